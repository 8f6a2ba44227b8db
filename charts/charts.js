// What report and view draw with: lines and bars, as SVG. All of ECharts would be twice as large.
import { BarChart, LineChart } from "echarts/charts";
import { AriaComponent, GridComponent, LegendComponent, MarkLineComponent, TooltipComponent } from "echarts/components";
import { use } from "echarts/core";
import { SVGRenderer } from "echarts/renderers";

export { init } from "echarts/core";

use([
  AriaComponent, BarChart, GridComponent, LegendComponent, LineChart, MarkLineComponent, SVGRenderer, TooltipComponent,
]);
