// The page at /docs: what /openapi.json says of each endpoint, its parameters and the fields of its body.

const METHODS = ["get", "post", "put", "patch", "delete"];
const $ = (id) => document.getElementById(id);

function make(name, className, ...children) {
  const element = document.createElement(name);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

async function load() {
  const answer = await fetch("openapi.json", { cache: "no-store" });
  if (!answer.ok) throw new Error(`The server answered ${answer.status}.`);
  return answer.json();
}

const schema = await load().catch((error) => {
  $("main").textContent = `The description of the API did not come: ${error.message}`;
  throw error;
});
const named = schema.components?.schemas ?? {};
const nameOf = (type) => type.$ref?.split("/").at(-1);

/** The type of a field in words, e.g. "list of ChatMessage or string". */
function words(type) {
  if (type.$ref) return nameOf(type);
  const several = type.anyOf ?? type.oneOf ?? type.allOf;
  if (several) return [...new Set(several.filter((each) => each.type !== "null").map(words))].join(" or ");
  if (type.enum ?? "const" in type) return (type.enum ?? [type.const]).map((value) => JSON.stringify(value)).join(", ");
  const limits = [type.minimum !== undefined && `at least ${type.minimum}`, type.exclusiveMinimum !== undefined && `above ${type.exclusiveMinimum}`,
    type.maximum !== undefined && `at most ${type.maximum}`, type.maxLength !== undefined && `at most ${type.maxLength} characters`];
  const what = type.type === "array" && type.items ? `list of ${words(type.items)}` : type.type ?? "any";
  return [what, ...limits.filter(Boolean)].join(", ");
}

/** The objects that a type is made of. */
function parts(type) {
  if (!type || typeof type !== "object") return [];
  return type.$ref ? [nameOf(type)] : Object.values(type).flatMap(parts);
}

function fields(name) {
  const { properties = {}, required = [] } = named[name] ?? {};
  return make("table", "", make("tbody", "", ...Object.entries(properties).map(([field, type]) => {
    const head = make("th", "", make("code", "", field)), given = type.default !== undefined && type.default !== null;
    head.scope = "row";
    const notes = [required.includes(field) && "Required.", type.description, given && `Default: ${JSON.stringify(type.default)}.`];
    return make("tr", "", head, make("td", "soft", words(type)), make("td", "", notes.filter(Boolean).join(" ")));
  })));
}

/** The body and all objects within it, each once. */
function body(type) {
  const found = parts(type);
  for (const name of found) found.push(...parts(named[name]).filter((each) => !found.includes(each)));
  const names = [...new Set(found)].filter((name) => named[name]?.properties);
  return names.flatMap((name, i) => [make("h3", "", i ? name : `Body: ${name}`), ...(named[name].description ? [make("p", "soft", named[name].description)] : []), fields(name)]);
}

function parameters(list) {
  if (!list?.length) return [];
  const rows = list.map(({ name, in: where, required, schema: type }) => {
    const head = make("th", "", make("code", "", name));
    head.scope = "row";
    return make("tr", "", head, make("td", "soft", words(type)), make("td", "", `In the ${where}.${required ? " Required." : ""}`));
  });
  return [make("h3", "", "Parameters"), make("table", "", make("tbody", "", ...rows))];
}

function example(method, path, hasBody) {
  const address = new URL(path.slice(1), document.baseURI).href;
  const data = hasBody ? ` -H "Content-Type: application/json" \\\n    -d '{...}'` : "";
  return make("pre", "", `curl ${method === "get" ? "" : `-X ${method.toUpperCase()} `}${address}${data}`);
}

function operation(path, method, of) {
  const type = Object.values(of.requestBody?.content ?? {})[0]?.schema;
  const element = make("details", "", make("summary", "", make("b", "", method.toUpperCase()), " ", make("code", "", path)));
  const text = of.description ?? `${of.summary}.`;
  element.firstChild.append(make("div", "soft", text.split("\n\n")[0]));
  element.id = `${method}-${path}`;
  element.dataset.text = `${method} ${path} ${text} ${[...new Set(parts(type))].map((name) => JSON.stringify(named[name])).join(" ")}`.toLowerCase();
  element.addEventListener("toggle", () => { // tables of all endpoints at once would be thousands of rows
    if (element.open && element.childElementCount === 1) element.append(example(method, path, type), ...parameters(of.parameters), ...body(type));
  });
  return element;
}

const OWN = "This server's own";
const API = [["OpenAI", "/v1/"], [OWN, "/v1/context"], [OWN, "/v1/warm"], [OWN, "/v1/stats"], [OWN, "/v1/cache/"], ["Anthropic", "/v1/messages"],
  ["Ollama", "/api/"], ["llama-server", "/"], [OWN, "/health"], [OWN, "/ready"], [OWN, "/metrics"]];
/** The API with the longest beginning of a path in common. */
const apiOf = (path) => API.filter(([, begin]) => path.startsWith(begin)).sort((a, b) => b[1].length - a[1].length)[0][0];

const all = Object.entries(schema.paths).flatMap(([path, methods]) =>
  METHODS.filter((method) => methods[method]).map((method) => [apiOf(path), operation(path, method, methods[method])]));
$("version").textContent = schema.info.version;
$("main").replaceChildren(...[...new Set(API.map(([name]) => name))].map((name) => make("section", "", make("h2", "", name), ...all.filter(([api]) => api === name).map(([, each]) => each))));
$("find").addEventListener("input", () => {
  const text = $("find").value.trim().toLowerCase();
  for (const [, element] of all) element.hidden = !element.dataset.text.includes(text);
  for (const section of document.querySelectorAll("section")) section.hidden = !section.querySelector("details:not([hidden])");
});
