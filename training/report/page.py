"""Write the report of a run: one self-contained HTML file without patients' data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any

import jinja2
import yaml
from markupsafe import Markup

from model_store.durable import write_durably
from model_store.task import Task
from personalization.metrics import METRICS
from training.algorithm import Publication
from training.data.cases import FEW_CASES, few_patients
from training.engine.history import RoundEntry, is_final
from training.methods.registry import method
from training.progress.format import duration, number, size
from training.progress.state import heading, in_order, is_score, measured
from training.record import RunRecord, SiteRecord
from training.report import tested
from training.report.charts import Change, Line, colour_of, forest_chart, line_chart
from training.report.transmission import mebibytes

# Captions of charts: of a score by the prefix of its name, of others by the name.
_MODELS = {
    "val_": "the global model as each site receives it",
    "joined_val_": "shared weights with each site's own",
    "local_val_": "what each site trained alone",
    "cluster_val_": "the model of each site's cluster",
    "personal_val_": "each site's own model",
}
_CAPTIONS = {
    "personal_share": "How much of its own training a site's own model keeps; 0 is the shared model.",
    "loss": "Training loss, mean over a round's batches.",
    "key_entropy": "Entropy of the keys that a site's images pick; 1 means that all are used equally.",
    "dead_keys": "Keys that no image of a site picks.",
}

# What was published, by its role or, of several models together, by its kind.
_ROLES = {
    "global": "the model that all sites share",
    "inside": "a site's own model",
    "cluster": "the model of a cluster of sites",
    "ssf-pool": "the pool of entries that all sites share",
    "cross-attention": "the models below together: the shared one is for new hospitals",
    "routing-space": "the models below together: the service chooses for each scan",
    "personal-models": "the models below together",
    "clusters": "the models below together",
}
# What travels, by the name of its group.
GROUPS = {
    "amplitudes": "amplitude spectra of single images",
    "bank": "what the other sites sent of their features",
    "centre": "the mean of all sites' features",
    "change": "what a round changed at a site",
    "changes": "what a site's own training changes, summed over its validation patients",
    "cluster": "the model of a site's cluster",
    "cluster_tested": "test scores of the cluster's model",
    "comparison": "validation scores of the shared model and of the site's own",
    "control": "the correction that keeps unlike sites together",
    "control_change": "what a round changed of it",
    "counts": "right answers by class, counted",
    "drift": "how far a site is from the shared model",
    "episodes": "what the practice as a hospital from outside changed",
    "fingerprint": "means of three features of the scans",
    "gradient": "the mean step of all sites",
    "gradient_change": "what a round changed of a site's step",
    "images": "pictures",
    "judged": "sums of the comparison with the version that the run started from",
    "members": "the own models of the sites that agreed to it",
    "metrics": "losses and scores for people to watch",
    "model": "a site's model, sent once",
    "moments": "batch-norm statistics of the shared model, measured at the end",
    "parent": "the weights that the run started from",
    "personal": "a site's own model",
    "personal_counts": "right answers of the site's own model by class, counted",
    "personal_score": "its validation score",
    "personal_tested": "test scores of the site's own model",
    "queries": "means of a network's features",
    "scores": "validation scores",
    "seed": "a random number, for the order of the images",
    "share": "how much of their own training small sites keep",
    "space": "the models that the practice chose from",
    "spread": "how far a site's slices are from the shared model's batch norm",
    "spread_members": "the number of sites that measured that",
    "spreads": "the same, in the practice",
    "statistics": "summary statistics of the scans, for the service's guard",
    "targets": "the size of what is outlined",
    "tested": "test scores of the shared model",
    "tokens": "means of a network's features of each organ",
    "usage": "how often each entry is picked",
    "weights": "the network's weights",
}

_TOGETHER = "all together"
# Scores of a model that all sites share.
_FOR_ALL = ("val_", "joined_val_")


def environment() -> jinja2.Environment:
    """Create the template environment of this package. Values are escaped unless they are `Markup`."""
    found = jinja2.Environment(
        loader=jinja2.PackageLoader("training.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {"size": size, "number": number, "duration": duration, "mebibytes": mebibytes}
    found.tests["few"] = lambda count: count < FEW_CASES
    return found


def write_report(record: RunRecord, path: Path, publication: Publication | None = None) -> Path:
    """Write the report of a finished run and return its path. `publication` adds its method's panels."""
    templates = environment()
    page = templates.get_template("report.html").render(
        record=record,
        tiles=_tiles(record),
        colours={site.name: colour_of(i) for i, site in enumerate(record.sites)},
        charts=_charts(record),
        heading=heading,
        sites=_site_rows(record),
        verdict=record.verdict,
        tested=tested.content(record.task, record.rounds),
        few_cases=FEW_CASES,
        roles=_ROLES,
        groups=GROUPS,
        events=_events(record.rounds),
        traffic=record.traffic(),
        task=_as_yaml(record.task),
        panels=_panels(record, publication, templates),
        privacy=_privacy(record.rounds),
        judged=_judged(record),
    )
    write_durably(path, page.encode())
    return path


def _panels(
    record: RunRecord, publication: Publication | None, templates: jinja2.Environment
) -> dict[str, list[Markup]]:
    """Render the method's own sections, by the section that they follow."""
    shown: dict[str, list[Markup]] = {"rounds": [], "traffic": []}
    for panel in method(record.method).panels:
        content = import_module(f"training.report.{panel.name}").content(record, publication)
        if content is not None:
            # The template has escaped all values except Markup.
            section = templates.get_template(f"{panel.name}.html").render({panel.name: content})
            shown[panel.after].append(Markup(section))
    return shown


def _as_yaml(task: Task) -> str:
    content = task.model_dump(mode="json", exclude_none=True)
    return yaml.safe_dump(content, sort_keys=False, default_flow_style=None)


def _main_phase(record: RunRecord) -> list[RoundEntry]:
    """Return the rounds of the longest phase with sites, which the charts show."""
    counts = Counter(entry.phase for entry in record.rounds if entry.sites)
    longest = max(counts, key=lambda name: counts[name], default=None)
    return [entry for entry in record.rounds if entry.phase == longest]


def _metric_names(record: RunRecord) -> list[str]:
    seen = {name for entry in record.rounds for site in entry.sites.values() for name in site.metrics}
    return in_order({name for name in seen if not is_final(name)})


def _caption(name: str) -> str:
    if (found := measured(name)) is None:
        return _CAPTIONS.get(name, "")
    return f"Validation {found[1].title} of {_MODELS[found[0]]}. A dot marks the best round."


def _best_of(values: Iterable[float], name: str) -> float | None:
    """The best of a score's values, which is the lowest of a distance."""
    found = measured(name)
    best = min if found and found[1].best == "lowest" else max
    return best(values, default=None)


def _validated(record: RunRecord, site: SiteRecord) -> int:
    """The patients, or the images of a classification, that a site's validation scores rest on."""
    return (site.patients if record.task.labels else site.files).get("val", 0)


def _few(record: RunRecord, site: SiteRecord) -> str:
    """Say on how few cases a site validates; empty of enough."""
    count = _validated(record, site)
    if count >= FEW_CASES:
        return ""
    of = "patients" if record.task.labels else "images"
    return few_patients(site.patients.get("val", 0)) or f"{count} {of}"


def _tiles(record: RunRecord) -> list[tuple[str, str, bool]]:
    """Figure, what it is, and whether it rests on too few cases to stand out."""
    traffic = record.traffic()
    tiles = [
        (str(len(record.sites)), "sites", False),
        (str(sum(sum(site.patients.values()) for site in record.sites)), "patients", False),
        (str(len(_main_phase(record))), "rounds", False),
    ]
    of = "patients" if record.task.labels else "images"
    total = sum(_validated(record, site) for site in record.sites)
    for metric in filter(is_score, _metric_names(record)):
        best = _best_mean(record, metric)
        if best is not None:
            few = sum(bool(_few(record, site)) for site in record.sites)
            note = f"; {few} of {len(record.sites)} sites on fewer than {FEW_CASES} {of}" if few else ""
            what = f"best validation {heading(metric)} of a round, mean{note}"
            tiles.append((number(best), what, total < FEW_CASES))
    traffic_size = size(sum(traffic["sent"].values()) + sum(traffic["received"].values()))
    return [*tiles, (traffic_size, "exchanged", False), (duration(record.seconds), "in rounds", False)]


def _values(rounds: Sequence[RoundEntry], site: str, metric: str) -> list[tuple[float, float]]:
    return [
        (entry.round + 1, entry.sites[site].metrics[metric])
        for entry in rounds
        if site in entry.sites and metric in entry.sites[site].metrics
    ]


def _best(rounds: Sequence[RoundEntry], site: str, metric: str) -> float | None:
    values = [value for _, value in _values(rounds, site, metric)]
    return _best_of(values, metric)


def _best_mean(record: RunRecord, metric: str) -> float | None:
    """Average a score over the sites: in the best round for a shared model, otherwise each site's own best.

    Only rounds with the most participating sites count, because fewer sites mean other patients. A
    participating site without a score does not disqualify a round: no patient of it has a target or a
    prediction.
    """
    score = measured(metric)
    if score is None or score[0] not in _FOR_ALL:
        own = [b for site in record.sites if (b := _best(record.rounds, site.name, metric)) is not None]
        return fmean(own) if own else None
    found = [
        (len(entry.sites), values)
        for entry in record.rounds
        if (values := [site.metrics[metric] for site in entry.sites.values() if metric in site.metrics])
    ]
    most = max((sites for sites, _ in found), default=0)
    return _best_of((fmean(values) for sites, values in found if sites == most), metric)


def _charts(record: RunRecord) -> list[dict[str, Any]]:
    rounds = _main_phase(record)
    charts = []
    for metric in _metric_names(record):
        score = measured(metric)
        lines = {
            site.name: Line(_values(rounds, site.name, metric), colour_of(i))
            for i, site in enumerate(record.sites)
        }
        if any(line.points for line in lines.values()):
            share, best = (score[1].is_share, score[1].best) if score else (False, None)
            charts.append(
                _chart(heading(metric), _caption(metric), line_chart(lines, share=share, best=best))
            )
    phase = f" in the phase '{rounds[0].phase}'" if rounds else ""
    caption = f"Cumulative bytes that a site sent and received{phase}."
    charts.append(_chart("traffic", caption, _traffic_chart(record, rounds)))
    seconds = {
        site.name: Line(
            [(e.round + 1, e.sites[site.name].seconds) for e in rounds if site.name in e.sites], colour_of(i)
        )
        for i, site in enumerate(record.sites)
    }
    charts.append(_chart("time", "A site's own time per round.", line_chart(seconds, unit="s")))
    return charts


def _chart(title: str, caption: str, svg: str) -> dict[str, Any]:
    # The SVG is drawn here and holds only numbers.
    return {"title": title, "caption": caption, "svg": Markup(svg)}


def _traffic_chart(record: RunRecord, rounds: Sequence[RoundEntry]) -> str:
    lines: dict[str, Line] = {}
    for i, site in enumerate(record.sites):
        total, points = 0, []
        for entry in rounds:
            if found := entry.deliveries.get(site.name):
                total += sum(found.sent.values()) + sum(found.received.values())
            points.append((float(entry.round + 1), float(total)))
        lines[site.name] = Line(points, colour_of(i))
    return line_chart(lines, unit="B")


def _site_rows(record: RunRecord) -> list[dict[str, Any]]:
    rows = []
    scores = [metric for metric in _metric_names(record) if is_score(metric)]
    for site in record.sites:
        entries = [found for entry in record.rounds if (found := entry.deliveries.get(site.name))]
        rows.append(
            {
                "name": site.name,
                "patients": site.patients,
                "files": sum(site.files.values()),
                "few": _few(record, site),
                "best": {metric: _best(record.rounds, site.name, metric) for metric in scores},
                "sent": sum(sum(entry.sent.values()) for entry in entries),
                "received": sum(sum(entry.received.values()) for entry in entries),
                "missed": sum(site.name in entry.dropped for entry in record.rounds),
            }
        )
    return rows


def _events(rounds: Sequence[RoundEntry]) -> list[str]:
    """Describe the sites that dropped out, the absent sites, and the withheld groups."""
    events = [
        f"{entry.phase}, round {entry.round + 1}: {site} dropped out: {reason}"
        for entry in rounds
        for site, reason in entry.dropped.items()
    ]
    absent = Counter((e.phase, site, reason) for e in rounds for site, reason in e.absent.items())
    events += [
        f"{phase}: {site} absent in {_times(n)}: {reason}" for (phase, site, reason), n in absent.items()
    ]
    withheld = Counter(
        (e.phase, site, group) for e in rounds for site, entry in e.sites.items() for group in entry.withheld
    )
    events += [
        f"{phase}: {site} withheld '{group}' in {_times(n)}" for (phase, site, group), n in withheld.items()
    ]
    return events


def _privacy(rounds: Sequence[RoundEntry]) -> dict[str, Any] | None:
    """What the updates with noise cost each site in the end, and the groups that left without noise."""
    last = {
        (name, group): cost
        for entry in rounds
        for name, site in entry.deliveries.items()
        for group, cost in site.privacy.items()
    }
    plain = {
        group
        for entry in rounds
        for site in entry.deliveries.values()
        for group in site.sent
        if group not in site.privacy
    }
    rows = [{"site": site, "group": group, "cost": cost} for (site, group), cost in last.items()]
    return {"rows": rows, "plain": sorted(plain)} if rows else None


def _judged(record: RunRecord) -> dict[str, Any] | None:
    """What the version is worth against the one that the run started from, site by site, and the figure."""
    found: Any = record.details.get("judged")
    if not found:
        return None
    sites = sorted(found["sites"].items(), key=lambda item: _least_first(item[0], item[1]))
    rows = {_TOGETHER: found["all"], **dict(sites)}
    scored = {name: row for name, row in rows.items() if row["count"]}
    changes = [Change(name, row["change"], row["low"], row["high"]) for name, row in scored.items()]
    title = METRICS[found["metric"]].title
    return {
        "parent": str(found["parent"]).partition("@")[0],
        "digest": str(found["parent"]).partition("@")[2],
        "metric": title,
        "of": "patients" if record.task.labels else "images",
        "rows": rows,
        "verdict": _verdict(found["all"], title),
        # The SVG is drawn here from numbers, and names that matplotlib escapes.
        "svg": Markup(forest_chart(changes, title)) if changes else None,
    }


def _least_first(site: str, row: Mapping[str, Any]) -> tuple[bool, float, str]:
    """The order of a change: the lowest first, then those of few cases by name."""
    few = row["count"] < FEW_CASES
    return few, 0.0 if few else row["change"], site


def judged_in_words(record: RunRecord) -> str:
    """One line on what the version is worth against its parent, for a record that has `judged`."""
    found: Any = record.details["judged"]
    every, title = found["all"], METRICS[found["metric"]].title
    if not every["count"]:
        return "no member has a patient to judge by that it does not train on"
    scores = f"{title} {number(every['parent'])} to {number(every['version'])}, n = {every['count']}"
    return f"{scores}. {_verdict(every, title)}"


def _verdict(change: Mapping[str, Any], metric: str) -> str:
    """What the change of all patients together says, in words."""
    if change["low"] is None:
        return "Too few patients were scored to say whether it is better than its parent."
    if change["low"] > 0:
        return f"It has a higher {metric} than its parent on these patients."
    if change["high"] < 0:
        return f"It has a lower {metric} than its parent on these patients: consider to keep the parent."
    return f"No difference in {metric} from its parent can be shown on these patients."


def _times(count: int) -> str:
    return "one round" if count == 1 else f"{count} rounds"
