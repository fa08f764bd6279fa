# The study as a workflow: config.yaml -> runs -> tables, figures, claims.
#   snakemake --profile workflow/profiles/local --config grid=mini


include: "workflow/rules/checked.smk"


configfile: "config.yaml"


include: "workflow/rules/common.smk"
include: "workflow/rules/sources.smk"
include: "workflow/rules/train.smk"
include: "workflow/rules/ood.smk"
include: "workflow/rules/report.smk"


rule all:
    default_target: True
    input:
        REPORT,
        # Named here too: Snakemake does not miss a deleted file that only finished reports were made from.
        METRICS,
        EVALUATED,
