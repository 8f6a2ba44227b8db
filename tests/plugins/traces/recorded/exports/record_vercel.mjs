// Runs the two tasks of record.py with Vercel's AI SDK; `python record.py vercel` starts it. Needs Node 20 and, in a
// `node_modules` folder above this file or above NODE_PATH: ai 6.0.326, @ai-sdk/openai-compatible 2.0.92,
// @opentelemetry/sdk-trace-node 2.12.1, @opentelemetry/exporter-trace-otlp-http 0.223.1, zod 4.6.7.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const installed = createRequire(pathToFileURL(`${process.env.NODE_FOLDER ?? "."}/x.js`));
const { generateText, streamText, ToolLoopAgent } = installed("ai");
const { createOpenAICompatible } = installed("@ai-sdk/openai-compatible");
const { NodeTracerProvider, SimpleSpanProcessor } = installed("@opentelemetry/sdk-trace-node");
const { OTLPTraceExporter } = installed("@opentelemetry/exporter-trace-otlp-http");
const { trace } = installed("@opentelemetry/api");

const provider = new NodeTracerProvider({ spanProcessors: [new SimpleSpanProcessor(new OTLPTraceExporter())] });
provider.register();
const rote = createOpenAICompatible({ name: "rote", baseURL: process.env.MODEL_URL, includeUsage: true });
const tracer = trace.getTracer("recorded");
const telemetry = (functionId) => ({ experimental_telemetry: { isEnabled: true, functionId } });

async function solve(prompt) {
  const options = { model: rote("rote"), system: "You are the solver.", prompt, temperature: 0.7 };
  return (await generateText({ ...options, ...telemetry("solver") })).text;
}

async function check(task, said) {
  const prompt = `${task}\n${said}\nRight?`;
  const result = streamText({ model: rote("rote"), system: "You are the checker.", prompt, ...telemetry("checker") });
  return await result.text;
}

for (const task of ["What is 3 + 4?", "What is 5 + 6?"]) {
  await tracer.startActiveSpan("team", async (span) => {
    const said = await solve(task);
    await check(task, said);
    span.setAttribute("creditflow.reward.outcome", said === "3 + 4 makes 7." ? 1 : 0);
    span.end();
  });
}
await provider.forceFlush();
