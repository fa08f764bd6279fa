"""What people do with single models."""

import argparse
import ast
import logging
from functools import partial
from pathlib import Path
from typing import Any

from linvit.catalogue import named
from linvit.cli.command import (
    Command,
    add_compute,
    add_config,
    add_out,
    add_training,
    compute_of,
    dataset_and_places,
    part_and_places,
    parts_of,
    positive,
    workers_of,
)
from linvit.config import ConfigError, Init, Study
from linvit.config.mistakes import meant
from linvit.grid import RunSpec, expand

log = logging.getLogger("linvit")

OF_CONVERSIONS = ("variant", "init", "blocks", "num_classes", "seed", "model", "model_kwargs")
"""Options of a conversion that the model of a run, written as it is, has no use for."""


def convert(options: argparse.Namespace) -> None:
    """Make a linear ViT of a Softmax one, as a folder that timm opens.

    SOURCE is a model's name in timm, a folder that timm opens, a checkpoint's file with --model, or a finished run's
    folder, whose model is written as it is. In Python: linvit.load(DIR); after linvit.register(),
    timm.create_model("local-dir:DIR", pretrained=True).
    """
    from linvit.convert import convert as convert_model
    from linvit.convert import export, is_run

    source = Path(options.source)
    if is_run(source):
        if given := [f"--{name.replace('_', '-')}" for name in OF_CONVERSIONS if getattr(options, name) is not None]:
            raise ConfigError(f"{source}: a run's model is written as it is; leave out {', '.join(given)}")
        model, start = export(source, options.out), "all as trained"
    elif not options.variant:
        raise ConfigError(f"--variant: missing; allowed: {', '.join(parts_of('variants', options.config))}")
    else:
        variant = named(parts_of("variants", options.config), options.variant, "variant")
        init = named(parts_of("inits", options.config), options.init or "fullcopy", "init")
        model = convert_model(
            options.source,
            options.out,
            variant=variant,
            init=init,
            blocks=options.blocks,
            architecture=options.model,
            model_kwargs=dict(options.model_kwargs or ()),
            num_classes=options.num_classes,
            seed=options.seed or 0,
        )
        start = _start(init, model)
    print(f"{options.out}: {_told(model)}; {start}")


def _convert_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="a name in timm, a folder or a file")
    parser.add_argument("--variant", metavar="NAME", help="attention operator: linvit show variants")
    parser.add_argument("--init", metavar="NAME", help="linvit show inits; default: fullcopy")
    parser.add_argument("--blocks", type=int, nargs="+", metavar="I", help="linearise these alone, -1 the last")
    parser.add_argument("--num-classes", type=positive, metavar="N", help="default: the source's")
    parser.add_argument("--seed", type=int, metavar="N", help="of what is not copied; default: 0")
    parser.add_argument("--model", metavar="NAME", help="timm's architecture of a file")
    parser.add_argument("--model-kwargs", type=_assignment, nargs="+", metavar="K=V", help="timm's, as img_size=384")
    add_config(parser)
    add_out(parser, "the folder to write", required=True)


def train(options: argparse.Namespace) -> None:
    """Carry out one run, from its spec to its metrics.

    RUN is a name that linvit grid lists, of any grid of the configuration, or the spec as JSON or a file. What it needs
    is prepared by linvit source and linvit dataset. A run that was stopped goes on from its checkpoint; one that is
    done is left as it is.
    """
    from linvit.plan import holds
    from linvit.ranks import joined
    from linvit.run import train as train_run

    spec, places = part_and_places(RunSpec, options.spec, options.config, partial(_run_named, options.config))
    sources, out = options.sources or places.results / "sources", options.out or places.results / "runs" / spec.name
    if holds(out / "metrics.json", spec=spec):
        print(f"{out}: this run is done; to train it anew, delete its metrics.json")
        return
    with joined() as ranks:
        metrics = train_run(spec, out, sources_folder=sources, ranks=ranks, **compute_of(options, places))
    if ranks.first:
        log.info("%s: top-1 %.2f", spec.name, metrics["top1"])


def _train_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("spec", metavar="RUN", help="a run's name, its spec as JSON, or a spec.json")
    add_config(parser)
    add_compute(parser)
    add_training(parser)
    parser.add_argument("--sources", type=Path, metavar="DIR", help="prepared sources; default: results/sources")
    add_out(parser, "the run's folder; default: results/runs/ and its name")


def evaluate(options: argparse.Namespace) -> None:
    """Tell a model's top-1 and top-5 on a data set's test split.

    MODEL is a converted folder or a run's; a run is evaluated on its own data set or a further test split of it.
    """
    from linvit.accuracy import accuracy_of
    from linvit.files import write_sealed

    part, places = dataset_and_places(options)
    data = options.data or places.data
    found = accuracy_of(options.model, part, data_root=data, workers=workers_of(options))
    print(
        f"{options.model} on {part.name}: top-1 {found['top1']:.2f} %, top-5 {found['top5']:.2f} %, "
        f"{found['images']:,} images"
    )
    if options.out:
        write_sealed(options.out, found)


def _evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", type=Path, help="a folder")
    parser.add_argument("dataset", metavar="DATASET", help="a name of the configuration, JSON, or a file with it")
    add_config(parser)
    add_compute(parser)
    add_out(parser, "a file for all that was found (json)")


def _run_named(config: Path, study: Study, argument: str) -> RunSpec:
    name = argument.removeprefix(f"{study.results}/runs/").rstrip("/")
    runs = {name: spec for grid in study.grids for name, spec in expand(study, grid).items()}
    if name not in runs:
        raise ConfigError(
            f"{argument}: no file, and no run of a grid in {config}{meant(name, runs)}; "
            "linvit grid --grid NAME lists them"
        )
    return runs[name]


def _start(init: Init, model: Any) -> str:
    """What a conversion's weights are, by groups."""
    from linvit.init.copy import groups_in

    groups = groups_in(model)
    copied = [group for group in groups if group in init.copied]
    fresh = [group for group in groups if group not in init.copied]
    shaped = f" (attention by {init.analytic})" if init.analytic else ""
    return f"copied: {', '.join(copied) or 'nothing'}; fresh: {', '.join(fresh) or 'nothing'}{shaped}"


def _told(model: Any) -> str:
    kinds = dict.fromkeys(type(block.attn).__name__ for block in model.blocks)
    parameters = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    return (
        f"{len(model.blocks)} blocks ({', '.join(kinds)}), {model.num_classes} classes, {parameters:.2f} M parameters"
    )


def _assignment(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not (key.isidentifier() and equals):
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: key=value")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


COMMANDS = (
    Command(
        convert,
        _convert_arguments,
        "linvit convert deit_small_patch16_224.fb_in1k --variant inline --out small",
    ),
    Command(train, _train_arguments, "linvit train fashion-1k/mini/relu/copy/fashion/seed0"),
    Command(evaluate, _evaluate_arguments, "linvit evaluate small imagenet --threads 8"),
)
