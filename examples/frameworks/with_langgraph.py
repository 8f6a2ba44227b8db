"""LangGraph. The only changes: `base_url` and `api_key` of the chat models."""

from __future__ import annotations

from typing import TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from pydantic import SecretStr

from creditflow import Task, Team


class Text(TypedDict):
    """The state that the nodes pass on."""

    subject: str
    draft: str
    final: str


async def solve(task: Task, team: Team) -> str:
    """A graph of two nodes."""

    def chat_model(agent: str) -> ChatOpenAI:
        return ChatOpenAI(model=agent, base_url=team.base_url, api_key=SecretStr(team.api_key))

    async def write(state: Text) -> dict[str, str]:
        said = await chat_model("writer").ainvoke([("system", "You write one line."), ("user", state["subject"])])
        return {"draft": str(said.content)}

    async def edit(state: Text) -> dict[str, str]:
        said = await chat_model("editor").ainvoke([("system", "You make a line better."), ("user", state["draft"])])
        return {"final": str(said.content)}

    graph = StateGraph(Text)
    graph.add_node("write", write)
    graph.add_node("edit", edit)
    graph.add_edge(START, "write")
    graph.add_edge("write", "edit")
    graph.add_edge("edit", END)
    done = await graph.compile().ainvoke({"subject": task.text, "draft": "", "final": ""})
    return str(done["final"])
