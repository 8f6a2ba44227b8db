// What report and view draw with: lines, bars and heat maps, as SVG. All of ECharts would be twice as large.
import { BarChart, HeatmapChart, LineChart } from "echarts/charts";
import {
  AriaComponent, DataZoomComponent, GridComponent, LegendComponent, MarkLineComponent, TooltipComponent, VisualMapComponent,
} from "echarts/components";
import { use } from "echarts/core";
import { SVGRenderer } from "echarts/renderers";

export { init } from "echarts/core";

use([
  AriaComponent, BarChart, DataZoomComponent, GridComponent, HeatmapChart, LegendComponent, LineChart, MarkLineComponent,
  SVGRenderer, TooltipComponent, VisualMapComponent,
]);
