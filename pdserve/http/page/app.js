// Connects the parts of the page: passes every snapshot of /observe to each component, and updates the header.

import { mark, put } from "./dom.js";
import { feed } from "./feed.js";
import { span } from "./format.js";
import { history } from "./history.js";
import "./admin.js";
import "./charts.js";
import "./chat.js";
import "./config.js";
import "./failures.js";
import "./key.js";
import "./map.js";
import "./request.js";
import "./tiles.js";
import "./ttft.js";

const find = (name) => document.querySelector(name);
let seenAt = null;

function showHeader(picture) {
  const { router, workers, pairs } = picture;
  const served = workers.map((one) => one.observed.server?.model).find(Boolean);
  const model = served ?? workers.map((one) => one.model_id).find((name) => name !== "unknown") ?? "";
  put(find("#model"), model.split("/").filter(Boolean).pop() ?? "");
  mark(find("#model"), "title", model);
  find("pd-chat").model = model || null;
  put(find("#uptime"), `v${router.version} · up ${span(router.time - router.started_at)}`);
  const allWell = workers.every((one) => one.is_healthy && one.breaker === "closed") && pairs.every((one) => one.serving);
  const [state, text] = !router.serving ? ["down", "not serving"] : allWell ? ["ok", "serving"] : ["warn", "serving, degraded"];
  setStatus(state, text);
}

function setStatus(state, text) {
  mark(find("#status"), "data-state", state);
  put(find("#status"), text);
}

function setBanner(text) {
  find("#banner").hidden = text === null;
  put(find("#banner"), text ?? "");
}

feed.addEventListener("picture", ({ detail: picture }) => {
  seenAt = Date.now();
  document.body.classList.remove("stale");
  setBanner(null);
  showHeader(picture);
  find("#chat").hidden = Boolean(picture.router.is_server) && picture.workers[0].worker_type === "prefill"; // it writes no answers
  find("#lock").hidden = feed.key === null;
  for (const name of ["pd-tiles", "pd-map", "pd-ttft", "pd-failures", "pd-request", "pd-admin"]) find(name).show(picture);
  history.start();
});

feed.addEventListener("lost", ({ detail: why }) => {
  document.body.classList.add("stale");
  const last = seenAt === null ? "" : ` The data shown is ${span((Date.now() - seenAt) / 1000)} old.`;
  setStatus("down", "no connection");
  setBanner(`The router does not answer: ${why}.${last}`);
});

feed.addEventListener("locked", () => setStatus("warn", "key needed"));
find("#lock").addEventListener("click", () => {
  feed.key = null;
  location.reload(); // removes all data that the key gave access to
});
feed.start();
