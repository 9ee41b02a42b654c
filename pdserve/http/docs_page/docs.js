// Shows the OpenAPI document of this server: operations with their parameters, bodies and answers, and a form that sends
// a request. Data from the network becomes text, never markup. The key is kept in this page's memory only.

import { example, typeOf } from "./schema.js";

const METHODS = ["get", "post", "put", "patch", "delete"];
const MAX_SHOWN_CHARS = 65536;
const MAX_DEPTH = 6;
const FIRST = ["/v1/", "/generate", "/api/"];
const byId = (id) => document.getElementById(id);
let key = "";
let schemas = {};

/** Creates an element. Attributes that begin with `on` are listeners. */
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

const headers = () => (key ? { Authorization: `Bearer ${key}` } : {});

function problem(text) {
  byId("problem").textContent = text;
  byId("problem").hidden = !text;
}

function table(names, rows) {
  const head = el("tr", {}, ...names.map((name) => el("th", { scope: "col" }, name)));
  const body = rows.map((cells) => el("tr", {}, ...cells.map((cell) => el("td", {}, ...[cell].flat()))));
  return el("div", { class: "scroll" }, el("table", {}, el("thead", {}, head), el("tbody", {}, ...body)));
}

/** The object schemas that a schema refers to or holds, by name; their fields are shown when they are opened. */
function inner(schema) {
  const found = new Map();
  const walk = (part, name, depth) => {
    if (!part || depth > MAX_DEPTH) return;
    if (part.$ref) {
      const target = part.$ref.split("/").pop();
      if (schemas[target]) found.set(target, schemas[target]);
      return;
    }
    for (const option of [...(part.anyOf ?? []), ...(part.oneOf ?? []), ...(part.allOf ?? [])]) walk(option, name, depth + 1);
    if (part.items) walk(part.items, name, depth + 1);
  };
  walk(schema, "", 0);
  return found;
}

function fields(schema, depth = 0) {
  const required = new Set(schema.required ?? []);
  const rows = Object.entries(schema.properties ?? {}).map(([name, field]) => {
    const type = [el("code", {}, typeOf(field))];
    if (depth < MAX_DEPTH) {
      for (const [title, part] of inner(field)) type.push(folded(title, () => fields(part, depth + 1)));
    }
    return [el("code", {}, name + (required.has(name) ? " *" : "")), type, field.description ?? ""];
  });
  const isDescribed = rows.some((cells) => cells[2]);
  const names = isDescribed ? ["field", "type", "meaning"] : ["field", "type"];
  const text = schema.description ? [el("p", { class: "muted" }, schema.description)] : [];
  return el("div", {}, ...text, rows.length ? table(names, rows.map((cells) => cells.slice(0, names.length))) : "");
}

/** Details whose content is made when they are first opened. */
function folded(title, make) {
  const node = el("details", { class: "inner" }, el("summary", {}, title));
  node.addEventListener("toggle", () => { if (node.open && node.children.length === 1) node.append(make()); });
  return node;
}

function trial(method, path, operation) {
  const media = Object.keys(operation.requestBody?.content ?? {})[0];
  const isJson = media === "application/json";
  const names = (operation.parameters ?? []).map((parameter) => ({ ...parameter, input: el("input", { placeholder: parameter.name, "aria-label": parameter.name }) }));
  const text = isJson ? JSON.stringify(example(operation.requestBody.content[media].schema, schemas), null, 2) : "";
  const body = el("textarea", { spellcheck: "false", "aria-label": "Body" });
  body.value = text;
  const shown = el("pre", { hidden: true, tabindex: "0" });
  const send = el("button", { type: "submit" }, "Send");
  const show = (said) => {
    shown.hidden = false;
    shown.textContent = said.length > MAX_SHOWN_CHARS ? `${said.slice(0, MAX_SHOWN_CHARS)}\n…` : said;
  };
  async function ask(event) {
    event.preventDefault();
    let url = path;
    const query = new URLSearchParams();
    for (const { name, in: where, input } of names) {
      if (where === "path") url = url.replace(`{${name}}`, encodeURIComponent(input.value));
      else if (input.value) query.set(name, input.value);
    }
    const suffix = query.size ? `?${query}` : "";
    send.disabled = true;
    try {
      const options = { method: method.toUpperCase(), headers: { ...headers(), ...(isJson ? { "Content-Type": "application/json" } : {}) } };
      if (isJson) options.body = body.value;
      const answer = await fetch(url.slice(1) + suffix, options);
      const reader = answer.body?.getReader();
      const decoder = new TextDecoder();
      let said = `${answer.status} ${answer.statusText}\n\n`;
      show(said);
      while (reader && said.length <= MAX_SHOWN_CHARS) {
        const { done, value } = await reader.read();
        if (done) break;
        said += decoder.decode(value, { stream: true });
        show(said);
      }
      await reader?.cancel();
    } catch (error) {
      show(String(error));
    } finally {
      send.disabled = false;
    }
  }
  const parts = [...names.map(({ input }) => input), ...(isJson ? [body] : []), send, shown];
  return el("form", { onsubmit: ask }, el("h2", {}, "Try it"), ...parts);
}

function details(method, path, operation) {
  const made = el("div");
  const parameters = operation.parameters ?? [];
  if (parameters.length) {
    const rows = parameters.map(({ name, in: where, schema }) => [el("code", {}, name), where, el("code", {}, typeOf(schema))]);
    made.append(el("h2", {}, "Parameters"), table(["name", "in", "type"], rows));
  }
  for (const [media, { schema }] of Object.entries(operation.requestBody?.content ?? {})) {
    made.append(el("h2", {}, `Body: ${media}`));
    const parts = inner(schema);
    for (const part of parts.values()) made.append(fields(part));
    if (!parts.size) made.append(fields(schema));
  }
  const rows = Object.entries(operation.responses ?? {}).map(([status, { description }]) => [status, description]);
  made.append(el("h2", {}, "Answers"), table(["status", "meaning"], rows), trial(method, path, operation));
  return made;
}

function show(document_) {
  schemas = document_.components?.schemas ?? {};
  byId("title").textContent = `${document_.info?.title ?? ""} API`;
  byId("version").textContent = document_.info?.version ?? "";
  const list = byId("operations");
  list.replaceChildren();
  const rank = (path) => FIRST.findIndex((prefix) => path.startsWith(prefix)) + 1 || FIRST.length + 1;
  const paths = Object.entries(document_.paths ?? {}).sort(([a], [b]) => rank(a) - rank(b));
  for (const [path, methods] of paths) {
    for (const method of METHODS.filter((name) => methods[name])) {
      const operation = methods[method];
      const title = el("summary", {}, el("span", { class: "method" }, method.toUpperCase()), el("code", { class: "path" }, path), el("span", { class: "muted" }, operation.summary ?? ""));
      const node = el("details", { class: "operation", "data-path": path }, title);
      node.addEventListener("toggle", () => { if (node.open && node.children.length === 1) node.append(details(method, path, operation)); });
      list.append(node);
    }
  }
  filter();
}

function filter() {
  const wanted = byId("search").value.trim().toLowerCase();
  for (const node of byId("operations").children) node.hidden = !node.dataset.path.toLowerCase().includes(wanted);
}

async function load() {
  try {
    const answer = await fetch("openapi.json", { headers: headers() });
    const said = await answer.json();
    if (answer.ok) {
      problem("");
      show(said);
    } else {
      problem(answer.status === 401 ? "This server needs an API key: enter it above." : (said.error?.message ?? `status ${answer.status}`));
    }
  } catch (error) {
    problem(String(error));
  }
}

byId("search").addEventListener("input", filter);
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value.trim();
  load();
});
load();
