"""Panels and queries as the dashboards of this folder use them.

Guarantee: a panel's id follows from its title, so that links to a panel outlive changes around it; every panel says in one
sentence what it means and what to do.
"""

import zlib
from typing import NamedTuple

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.models.common import (
    GraphGradientMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    DataTransformerConfig,
    DynamicConfigValue,
    VariableOption,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

PROMETHEUS = DataSourceRef(type_val="prometheus", uid="${datasource}")
TOKENS_PER_SECOND = "suffix: tok/s"
SHARE = "percentunit"
HEIGHT, COLUMNS = 8, 24


class Series(NamedTuple):
    """A query and the legend of what it gives; `{{label}}` is the value of a label."""

    expr: str
    legend: str


# Queries


def of_run(metric: str, *matchers: str) -> str:
    """The metric of the run that is looked at."""
    chosen = ",".join(('run="$run"', *matchers))
    return f"{metric}{{{chosen}}}"


def latest(metric: str, by: str = "") -> str:
    """A gauge of the trainer, whichever process of a restarted one it comes from."""
    grouping = f" by ({by})" if by else ""
    return f"max{grouping} ({of_run(metric)})"


def rate(metric: str, *matchers: str) -> str:
    return f"rate({of_run(metric, *matchers)}[$__rate_interval])"


def total_rate(metric: str, by: str = "") -> str:
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} ({rate(metric)})"


def by_producer(expr: str, *labels: str, aggregate: str = "sum") -> str:
    """`expr`, of producers, with the names of those that were chosen.

    Args:
        labels: to keep beside the name.
    """
    names = of_run("rl_producer_info", 'producer=~"$producer"')
    named = f"{expr} * on (run, instance, pid) group_left (producer) {names}"
    return f"{aggregate} by ({', '.join(('producer', *labels))}) ({named})"


def quantile(share: float, histogram: str) -> str:
    return f"histogram_quantile({share:g}, {total_rate(f'{histogram}_bucket', 'le')})"


def producer_quantile(share: float, histogram: str) -> str:
    return f"histogram_quantile({share:g}, {by_producer(rate(f'{histogram}_bucket'), 'le')})"


# Panels


def graph(
    title: str,
    description: str,
    unit: str,
    *series: Series,
    span: int = 8,
    stacked: bool = False,
    least: float | None = 0,
    most: float | None = None,
) -> timeseries.Panel:
    """Lines over time.

    Args:
        least: of the axis.
        most: of the axis.
    """
    panel = (
        timeseries.Panel()
        .id(_id(title))
        .title(title)
        .description(description)
        .datasource(PROMETHEUS)
        .unit(unit)
        .span(span)
        .height(HEIGHT)
        .show_points(VisibilityMode.NEVER)
        .gradient_mode(GraphGradientMode.NONE)
        .fill_opacity(60 if stacked else 0)
        .legend(
            common.VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
            .calcs(["lastNotNull"])
        )
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
    )
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL).group("A"))
    if least is not None:
        panel = panel.min(least)
    if most is not None:
        panel = panel.max(most)
    for query in _queries(series):
        panel = panel.with_target(query)
    return panel


def band(panel: timeseries.Panel, upper: str, lower: str) -> timeseries.Panel:
    """Fills what is between two lines of a graph, named by their legends."""
    thin = DynamicConfigValue("custom.lineWidth", 0)
    between = [DynamicConfigValue("custom.fillBelowTo", lower), DynamicConfigValue("custom.fillOpacity", 15), thin]
    return panel.override_by_name(upper, between).override_by_name(lower, [thin])


def number(title: str, description: str, unit: str, series: Series, span: int = 4) -> stat.Panel:
    """One value, now."""
    return (
        stat.Panel()
        .id(_id(title))
        .title(title)
        .description(description)
        .datasource(PROMETHEUS)
        .unit(unit)
        .span(span)
        .height(4)
        .with_target(_query("A", series))
    )


def distribution(title: str, description: str, histogram: str, unit: str, span: int = 8) -> heatmap.Panel:
    """A histogram over time."""
    expr = f"sum by (le) (increase({of_run(f'{histogram}_bucket')}[$__rate_interval]))"
    return (
        heatmap.Panel()
        .id(_id(title))
        .title(title)
        .description(description)
        .datasource(PROMETHEUS)
        .unit(unit)
        .y_axis(heatmap.YAxisConfig().unit(unit))
        .show_legend()
        .span(span)
        .height(HEIGHT)
        .with_target(_query("A", Series(expr, "{{le}}")).format(PromQueryFormat.HEATMAP))
    )


class Column(NamedTuple):
    """A column of a table: an instant query with one row per `producer`."""

    title: str
    expr: str
    unit: str


def overview(title: str, description: str, *columns: Column) -> table.Panel:
    """A row per producer."""
    panel = (
        table.Panel()
        .id(_id(title))
        .title(title)
        .description(description)
        .datasource(PROMETHEUS)
        .unit("short")
        .span(COLUMNS)
        .height(HEIGHT)
        .show_header(True)
    )
    names: dict[str, object] = {"producer": "producer"}
    for place, column in enumerate(columns):
        reference = chr(ord("A") + place)
        query = _query(reference, Series(column.expr, column.title)).instant().format(PromQueryFormat.TABLE)
        panel = panel.with_target(query)
        panel = panel.override_by_name(column.title, [DynamicConfigValue("unit", column.unit)])
        names[f"Value #{reference}"] = column.title
    arranged: dict[str, object] = {"excludeByName": {"Time": True}, "renameByName": names}
    return panel.transformations(
        [DataTransformerConfig(id_val="merge", options={}), DataTransformerConfig(id_val="organize", options=arranged)]
    )


# Dashboards


def board(uid: str, title: str, description: str, *, producers: bool = False) -> dashboard.Dashboard:
    """An empty dashboard with its variables.

    Args:
        producers: whether producers can be chosen.
    """
    built = (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags(["slipstream"])
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .time("now-3h", "now")
        .refresh("30s")
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(_choice("run", "Run", "label_values(rl_trainer_info, run)"))
        .link(
            dashboard.DashboardLink("Slipstream")
            .type(DashboardLinkType.DASHBOARDS)
            .tags(["slipstream"])
            .icon("external link")
            .tooltip("")
            .url("")
            .as_dropdown(True)
            .include_vars(True)
            .keep_time(True)
        )
    )
    if producers:
        names = _choice("producer", "Producer", f"label_values({of_run('rl_producer_info')}, producer)")
        everyone = VariableOption(selected=True, text="All", value="$__all")
        built = built.with_variable(names.multi(True).include_all(True).all_value(".*").current(everyone))
    return built


def _choice(name: str, label: str, query: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(PROMETHEUS)
        .query(query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
    )


def _queries(series: tuple[Series, ...]) -> list[prometheus.Dataquery]:
    return [_query(chr(ord("A") + place), one) for place, one in enumerate(series)]


def _query(reference: str, series: Series) -> prometheus.Dataquery:
    query = prometheus.Dataquery().ref_id(reference).expr(series.expr).legend_format(series.legend)
    return query.datasource(PROMETHEUS)


def _id(title: str) -> int:
    return zlib.crc32(title.encode()) >> 1  # positive as a signed 32-bit number
