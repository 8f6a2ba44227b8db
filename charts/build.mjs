// `make charts`: bundles charts.js into the package, with the licences of what is in it.
import { readFileSync, writeFileSync } from "node:fs";
import { build } from "esbuild";

const target = new URL("../src/creditflow/reports/page/", import.meta.url).pathname;
await build({
  entryPoints: ["charts.js"], bundle: true, minify: true, format: "iife", globalName: "charts",
  legalComments: "inline", charset: "utf8", outfile: `${target}charts.min.js`,
});
const of = (name, file) => readFileSync(`node_modules/${name}/${file}`, "utf8").trim();
const version = (name) => JSON.parse(of(name, "package.json")).version;
writeFileSync(`${target}charts.LICENSE`, [
  `charts.min.js holds parts of Apache ECharts ${version("echarts")} (Apache-2.0), zrender ${version("zrender")} (BSD-3-Clause) and`,
  `tslib ${version("tslib")} (0BSD). Their licences:`,
  ...["echarts/LICENSE", "echarts/NOTICE", "zrender/LICENSE", "tslib/LICENSE.txt"].flatMap((path) => {
    const [name, file] = path.split("/");
    return ["", `==== ${name}: ${file} ====`, "", of(name, file)];
  }),
  "",
].join("\n"));
