# From cached metrics to tables, figures and claims; each depends on its own code as well.
# Table 2 and claim C10 are about results out of distribution.
WITH_OOD = "--ood {input.ood:q}" if OOD else ""
TABLES = tables_of(RUNS.values(), EVALUATIONS.values())
CURVES = history_figures_of(RUNS.values())
FIGURES = figures_of(RUNS.values()) + CURVES
HISTORY = f"{GRID}/history.csv"
REPORT = [
    f"{GRID}/runs.csv",
    expand(
        f"{GRID}/{{table}}.{{suffix}}",
        table=TABLES,
        suffix=["csv", "md", "html", "tex"],
    ),
    f"{GRID}/runs.html",
    expand(f"{GRID}/{{figure}}.{{suffix}}", figure=FIGURES, suffix=["png", "pdf"]),
    multiext(f"{GRID}/claims", ".md", ".html"),
    [HISTORY] if CURVES else [],
    *OOD,
]


report: "../report/workflow.rst"


localrules:
    all,
    runs,
    history,
    tables,
    figure,
    claims,


rule runs:
    input:
        metrics=METRICS,
        code=COLLECTING,
    output:
        f"{GRID}/runs.csv",
    log:
        f"{GRID}/runs.log",
    conda:
        ENVIRONMENT
    script:
        "../scripts/collect.py"


rule history:
    input:
        metrics=METRICS,
        code=COLLECTING,
    output:
        HISTORY,
    log:
        f"{GRID}/history.log",
    conda:
        ENVIRONMENT
    script:
        "../scripts/collect.py"


rule tables:
    input:
        runs=f"{GRID}/runs.csv",
        ood=OOD,
        code=expand(
            f"{PACKAGE}/{{file}}",
            file=[
                "tables.py",
                "incomplete.py",
                "page.py",
                "published.py",
                "published.yaml",
                "report.py",
                "results.py",
            ],
        ),
    output:
        expand(
            f"{GRID}/{{table}}.{{suffix}}", table=TABLES, suffix=["csv", "md", "tex"]
        ),
        [
            report(
                f"{GRID}/{table}.html",
                category=SECTIONS.get(table, "0 Overview"),
                labels={"result": title_of(table)},
            )
            for table in TABLES
        ],
        report(
            f"{GRID}/runs.html",
            category="0 Overview",
            labels={"result": "Runs"},
        ),
    log:
        f"{GRID}/tables.log",
    conda:
        ENVIRONMENT
    shell:
        f"{LINVIT} tables {{input.runs:q}} {WITH_OOD} --out {quote(GRID)} 2> {{log:q}}"


rule figure:
    input:
        runs=f"{GRID}/runs.csv",
        history=lambda wildcards: [HISTORY] if wildcards.figure in CURVES else [],
        code=[
            *sorted(map(str, PACKAGE.glob("figures/*.py"))),
            f"{PACKAGE}/incomplete.py",
            f"{PACKAGE}/report.py",
            f"{PACKAGE}/results.py",
        ],
    output:
        report(
            f"{GRID}/{{figure}}.png",
            caption="../report/figure.rst",
            category=lambda wildcards: SECTIONS[wildcards.figure],
            labels=lambda wildcards: {"result": title_of(wildcards.figure)},
        ),
        f"{GRID}/{{figure}}.pdf",
    log:
        f"{GRID}/{{figure}}.log",
    conda:
        ENVIRONMENT
    shell:
        f"{LINVIT} figure {{wildcards.figure}} {{input.runs:q}} --history {quote(HISTORY)} --out {{output:q}}"
        " 2> {log:q}"


rule claims:
    input:
        runs=f"{GRID}/runs.csv",
        ood=OOD,
        code=expand(
            f"{PACKAGE}/{{file}}",
            file=[
                "claims.py",
                "comparisons.py",
                "evidence.py",
                "incomplete.py",
                "page.py",
                "results.py",
            ],
        ),
    output:
        f"{GRID}/claims.md",
        report(
            f"{GRID}/claims.html",
            category="0 Overview",
            labels={"result": "Claims C1 to C11"},
        ),
    log:
        f"{GRID}/claims.log",
    conda:
        ENVIRONMENT
    shell:
        f"{LINVIT} claims {{input.runs:q}} {WITH_OOD} --out {{output:q}} 2> {{log:q}}"
