// What a dashboard may look like: @grafana/schema's types, with each panel held to those of its own kind.

import type { Dashboard, DataQuery, Panel } from "@grafana/schema";
import type * as heatmap from "@grafana/schema/dist/esm/raw/composable/heatmap/panelcfg/x/HeatmapPanelCfg_types.gen";
import type * as stat from "@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen";
import type * as table from "@grafana/schema/dist/esm/raw/composable/table/panelcfg/x/TablePanelCfg_types.gen";
import type * as timeseries from "@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen";

// JSON has the values of an enum, not its names.
type Json<T> = T extends string ? `${T}` : T extends object ? { [K in keyof T]: Json<T[K]> } : T;

interface PrometheusQuery extends DataQuery {
  expr: string;
  legendFormat: string;
  instant?: boolean;
  range?: boolean;
  format?: "time_series" | "table" | "heatmap";
}

type Of<Kind extends string, Options, Fields = Record<string, unknown>> = Omit<
  Panel<Options, Fields>,
  "type" | "targets" | "options"
> & { id: number; type: Kind; title: string; description: string; targets: PrometheusQuery[]; options?: Partial<Options> };

type AnyPanel =
  | Of<"timeseries", timeseries.Options, timeseries.FieldConfig>
  | Of<"stat", stat.Options>
  | Of<"table", table.Options, table.FieldConfig>
  | Of<"heatmap", heatmap.Options, heatmap.FieldConfig>;

export type Board = Json<Omit<Dashboard, "panels"> & { uid: string; title: string; panels: AnyPanel[] }>;
