# From cached metrics to tables, figures and claims; each depends on its own code as well.
FIGURES = ["fig2", "fig4"]
LOSSES = {run.init.distill.loss for run in RUNS.values() if run.init.distill}
if LOSSES - {"output", "map"}:  # others than the paper's
    FIGURES.append("losses")
REPORT = [
    f"{GRID}/runs.csv",
    multiext(f"{GRID}/top1", ".csv", ".md", ".tex"),
    expand(f"{GRID}/{{figure}}.{{suffix}}", figure=FIGURES, suffix=["png", "pdf"]),
    f"{GRID}/claims.md",
]


localrules:
    all,
    runs,
    tables,
    figure,
    claims,


rule runs:
    input:
        expand(f"{RESULTS}/runs/{{run}}/metrics.json", run=RUNS),
    output:
        f"{GRID}/runs.csv",
    log:
        f"{GRID}/runs.log",
    conda:
        ENVIRONMENT
    script:
        "../scripts/collect.py"


rule tables:
    input:
        runs=f"{GRID}/runs.csv",
        code=[f"{PACKAGE}/tables.py", f"{PACKAGE}/results.py"],
    output:
        multiext(f"{GRID}/top1", ".csv", ".md", ".tex"),
    log:
        f"{GRID}/tables.log",
    conda:
        ENVIRONMENT
    shell:
        f"{LINVIT} tables {{input.runs:q}} --out {quote(GRID)} 2> {{log:q}}"


rule figure:
    input:
        runs=f"{GRID}/runs.csv",
        code=[
            f"{PACKAGE}/{module}.py"
            for module in ("figures", "figures_losses", "results")
        ],
    output:
        multiext(f"{GRID}/{{figure}}", ".png", ".pdf"),
    log:
        f"{GRID}/{{figure}}.log",
    conda:
        ENVIRONMENT
    shell:
        f"{LINVIT} figure {{wildcards.figure}} {{input.runs:q}} --out {{output:q}} 2> {{log:q}}"


rule claims:
    input:
        runs=f"{GRID}/runs.csv",
        code=[f"{PACKAGE}/{module}.py" for module in ("claims", "evidence", "results")],
    output:
        f"{GRID}/claims.md",
    log:
        f"{GRID}/claims.log",
    conda:
        ENVIRONMENT
    shell:
        f"{LINVIT} claims {{input.runs:q}} --out {{output:q}} 2> {{log:q}}"
