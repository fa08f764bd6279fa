# What runs start from. Snakemake sees small manifests; the weights and images beside them may be deleted.


rule dataset:
    output:
        f"{RESULTS}/data/{{dataset}}.json",
    log:
        f"{RESULTS}/data/{{dataset}}.log",
    params:
        dataset=lambda wildcards: DATASETS[wildcards.dataset].model_dump_json(exclude_defaults=True),
    shell:
        f"{LINVIT} dataset {{params.dataset:q}} --out {{output:q}} --data {STUDY.data}"
        f" {'--download' if STUDY.download else ''} 2> {{log:q}}"


rule source:
    input:
        lambda wildcards: data_of(SOURCES[f"{wildcards.source}/{wildcards.size}"].train),
    output:
        f"{RESULTS}/sources/{{source}}/{{size}}/source.json",
    log:
        f"{RESULTS}/sources/{{source}}/{{size}}/source.log",
    params:
        source=lambda wildcards: SOURCES[f"{wildcards.source}/{wildcards.size}"].model_dump_json(exclude_defaults=True),
    threads: 1
    shell:
        f"{LINVIT} source {{params.source:q}} --out $(dirname {{output:q}}) --data {STUDY.data}"
        " --threads {threads} 2>> {log:q}"


def data_of(run):
    """The manifest of a run's data set."""
    return ancient(f"{RESULTS}/data/{run.dataset.name}.json") if run else []


def source_of(run):
    """The manifest of a run's source."""
    return ancient(f"{RESULTS}/sources/{run.source.folder}/source.json") if run.source else []
