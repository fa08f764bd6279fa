# Trained runs on further test splits of their data set: no training, and again on its own by `snakemake ood`.
EVALUATED = expand(f"{RESULTS}/runs/{{evaluation}}.json", evaluation=EVALUATIONS)


localrules:
    ood,
    ood_table,


rule ood:
    input:
        EVALUATED,
        OOD,


rule evaluate_ood:
    input:
        # Not ancient: a run that was trained again is evaluated again.
        run=f"{RESULTS}/runs/{{run}}/metrics.json",
        data=ancient(f"{RESULTS}/data/{{dataset}}.json"),
    output:
        f"{RESULTS}/runs/{{run}}/ood/{{dataset}}.json",
    log:
        f"{RESULTS}/runs/{{run}}/ood/{{dataset}}.log",
    conda:
        ENVIRONMENT
    threads: 1
    resources:
        mem_mb=1500,
    params:
        dataset=lambda wildcards: DATASETS[wildcards.dataset].model_dump_json(
            exclude_defaults=True
        ),
    shell:
        f'{LINVIT} evaluate "$(dirname {{input.run:q}})" {{params.dataset:q}} --out {{output:q}}'
        f" --data {quote(STUDY.data)} --threads {{threads}} > {{log:q}} 2>&1"


rule ood_table:
    input:
        metrics=EVALUATED,
        code=COLLECTING,
    output:
        f"{GRID}/ood.csv",
    log:
        f"{GRID}/ood.log",
    conda:
        ENVIRONMENT
    script:
        "../scripts/collect.py"
