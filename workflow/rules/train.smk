# One job a run. The run's resolved settings are its parameters: they alone decide whether it is trained again.
METRICS = expand(f"{RESULTS}/runs/{{run}}/metrics.json", run=RUNS)


rule train:
    input:
        data=lambda wildcards: data_of(RUNS[wildcards.run]),
        source=lambda wildcards: source_of(RUNS[wildcards.run]),
    output:
        f"{RESULTS}/runs/{{run}}/metrics.json",
    log:
        f"{RESULTS}/runs/{{run}}/train.log",
    conda:
        ENVIRONMENT
    threads: 1
    resources:
        mem_mb=1500,
    params:
        spec=lambda wildcards: RUNS[wildcards.run].to_json(),
        # The place of things makes no run stale: Snakemake does not compare parameters that know of outputs.
        call=lambda wildcards, output: "linvit.jobs:Train",
        sources=lambda wildcards, output: f"{RESULTS}/sources",
        data=lambda wildcards, output: STUDY.data,
        decoded=lambda wildcards, output: f"{RESULTS}/data",
        tensorboard=lambda wildcards, output: STUDY.tensorboard,
    shell:
        f'{LINVIT} train {{params.spec:q}} --out "$(dirname {{output:q}})" --sources {{params.sources:q}}'
        " --data {params.data:q} --decoded {params.decoded:q} --threads {threads}"
        f" {'--tensorboard' if STUDY.tensorboard else ''} 2>> {{log:q}}"
