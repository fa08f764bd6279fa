# What runs start from. Snakemake sees small manifests; the weights and decoded images beside them may be deleted.


rule dataset:
    output:
        f"{RESULTS}/data/{{dataset}}.json",
    log:
        f"{RESULTS}/data/{{dataset}}.log",
    conda:
        ENVIRONMENT
    params:
        dataset=lambda wildcards: DATASETS[wildcards.dataset].model_dump_json(
            exclude_defaults=True
        ),
    shell:
        f"{LINVIT} dataset {{params.dataset:q}} --out {{output:q}} --data {quote(STUDY.data)}"
        f" {'--download' if STUDY.download else ''} 2> {{log:q}}"


rule source:
    input:
        lambda wildcards: data_of(SOURCES[f"{wildcards.source}/{wildcards.size}"].train),
    output:
        f"{RESULTS}/sources/{{source}}/{{size}}/source.json",
    log:
        f"{RESULTS}/sources/{{source}}/{{size}}/source.log",
    conda:
        ENVIRONMENT
    threads: 1
    params:
        source=lambda wildcards: SOURCES[
            f"{wildcards.source}/{wildcards.size}"
        ].model_dump_json(exclude_defaults=True),
        call=lambda wildcards, output: "linvit.jobs:PrepareSource",
        data=lambda wildcards, output: STUDY.data,
        decoded=lambda wildcards, output: f"{RESULTS}/data",
        tensorboard=lambda wildcards, output: STUDY.tensorboard,
    shell:
        f'{LINVIT} source {{params.source:q}} --out "$(dirname {{output:q}})" --data {{params.data:q}}'
        " --decoded {params.decoded:q} --threads {threads}"
        f" {'--tensorboard' if STUDY.tensorboard else ''} 2>> {{log:q}}"
