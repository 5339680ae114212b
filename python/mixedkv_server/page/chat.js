// The page at /: chats with the server's models, over /v1/chat/completions.

import { addNode, branch, children, deleteChat, listChats, loadChat, merge, newChat, openChats, saveChat, tip } from "./chats.js";
import { codeBlock, make, showMarkdown } from "./markdown.js";

const KEY = "mixedkv-key", DRAFT = "mixedkv-draft", SAVE_MS = 1000, RETRY_MS = 3000, MAX_TITLE = 80, MAX_SIDE = 1536 /* pixels */, LENGTH = 256;
const MAX_FILE = 2e6 /* bytes */, LONG_PASTE = 3000 /* characters */, LONG_MESSAGE = 1500, NUMBERS = ["temperature", "top_p", "seed", "max_tokens"];
const $ = (id) => document.getElementById(id);
const count = (n, what) => `${new Intl.NumberFormat("en").format(n)} ${what}${n === 1 ? "" : "s"}`;
const writings = new Map(); // by chat: {chat, node, abort}, answers that this tab receives
const shown = new Map(); // by message: the function that draws it again
let chat = newChat(), models = [], images = [], texts = [], secret = "";

// --- the server ---

/** A place of this tab that survives a reload, where the browser has one. */
const tab = {
  get(name) { try { return sessionStorage.getItem(name) ?? ""; } catch { return ""; } },
  set(name, value) { try { value ? sessionStorage.setItem(name, value) : sessionStorage.removeItem(name); } catch { /* none */ } },
};

async function request(path, options = {}) {
  const headers = { ...(secret && { Authorization: "Bearer " + secret }), ...(options.body && { "Content-Type": "application/json" }) };
  const answer = await fetch(path, { ...options, headers, cache: "no-store" });
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => null);
  if (answer.status === 401) wantKey();
  const said = body?.error?.message?.replace(/^[a-z_]+(\.\w+)*: /, ""); // without the field of the API
  throw Object.assign(new Error(said ?? `The server answered ${answer.status}.`), { code: body?.error?.code });
}

async function loadModels() {
  try {
    const { data } = await (await request("v1/models")).json();
    models = data.filter((each) => each.meta.capabilities.includes("completion"));
    $("model").replaceChildren(...models.map((each) => new Option(each.id, each.id)));
    tell("");
    useKey(secret);
  } catch (error) {
    if (!(error instanceof TypeError)) return tell($("key").hidden ? error.message : "");
    tell("The server is out of reach. Trying again.");
    setTimeout(loadModels, RETRY_MS);
  }
  showSettings();
}

function wantKey() {
  $("refused").textContent = secret ? "The server does not know this key." : "";
  useKey("");
  $("key").hidden = false;
  $("secret").focus();
}

function useKey(key) {
  secret = key;
  tab.set(KEY, key);
  $("forget").hidden = !key;
  $("key").hidden = true;
}

/** The events of a stream. */
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
    }
  }
}

// --- asking ---

/** What a message says: its attached texts, each under its name, and what was typed. */
const whole = ({ content, texts: given = [] }) => [...given.map(({ name, text }) => `${name}:\n\n${text}`), content].filter(Boolean).join("\n\n");

/** The messages of a branch as the server takes them. */
function messages(of, end) {
  const out = of.settings.system ? [{ role: "system", content: of.settings.system }] : [];
  for (const { role, content, images: seen, texts: given, reasoning, calls, call } of branch(of, end)) {
    if (role === "user") {
      const said = whole({ content, texts: given });
      const parts = (seen ?? []).map((url) => ({ type: "image_url", image_url: { url } }));
      const text = parts.length ? [...parts, { type: "text", text: said }] : said;
      if (out.at(-1)?.role === "user") out.pop(); // its answer failed
      out.push({ role, content: text });
    } else if (role === "tool") out.push({ role, tool_call_id: call, content });
    else if (content || calls.length) {
      out.push({ role, content, ...(reasoning && { reasoning_content: reasoning }), ...(calls.length && { tool_calls: calls }) });
    }
  }
  return out;
}

/** A base model is not tuned for chat: it continues the text of all messages. */
const isBase = (of) => (models.find((each) => each.id === of.settings.model) ?? models[0])?.meta.chats === false;

async function answer(of, parent) {
  const { model, temperature, top_p, seed, max_tokens, tools } = of.settings;
  const prompt = isBase(of) ? { prompt: branch(of, parent).map(whole).join(""), max_tokens: max_tokens ?? LENGTH } : { messages: messages(of, parent), max_tokens, tools };
  const body = { model: model ?? models[0]?.id, ...prompt, temperature, top_p, seed, stream: true, stream_options: { include_usage: true }, return_progress: true };
  const node = addNode(of, parent, { role: "assistant", content: "", reasoning: "", calls: [], state: "writing", note: "" });
  const writing = { chat: of, node, abort: new AbortController() };
  writings.set(of.id, writing);
  await keep(of, node);
  show();
  try {
    await receive(writing, body);
    node.state = "done";
  } catch (error) {
    node.state = writing.abort.signal.aborted ? "stopped" : "failed";
    if (node.state === "failed") node.error = error instanceof TypeError ? "The server is out of reach." : error.message;
    if (error.code === "context_length_exceeded") putBack(of, of.nodes[parent], error.message);
  }
  await keep(of, node);
  writings.delete(of.id); // only now: an answer that looks finished is one that a reload does not lose
  if (of === chat) show();
}

/** Show a chat as it was before a message that is too long, and the message in the box again, to be shortened. */
function putBack(of, said, why) {
  if (said.role !== "user" || of !== chat || $("text").value || texts.length || images.length) return;
  of.shown = said.parent;
  $("text").value = said.content;
  [texts, images] = [said.texts ?? [], said.images ?? []];
  fit();
  showAttached();
  tell(`Not sent: ${why}`);
}

async function receive(writing, body) {
  const { chat: of, node, abort } = writing;
  const stream = await request(body.messages ? "v1/chat/completions" : "v1/completions", { method: "POST", body: JSON.stringify(body), signal: abort.signal });
  let began = 0, saved = performance.now(), drawing = false, usage = null, reason = "";
  for await (const event of events(stream)) {
    if (event.error) throw new Error(event.error.message);
    const { delta = {}, text = "", finish_reason } = event.choices?.[0] ?? {};
    const { total, cache, processed } = event.prompt_progress ?? {};
    node.progress = total ? `Processing prompt: ${processed} of ${count(total, "token")}${cache ? `, ${cache} from cache` : ""}` : "";
    node.content += delta.content ?? text;
    node.reasoning += delta.reasoning_content ?? "";
    for (const call of delta.tool_calls ?? []) addCall(node, call);
    usage = event.usage ?? usage;
    reason = finish_reason ?? reason;
    if (!began && (node.content || node.reasoning)) began = performance.now();
    if (!drawing) {
      drawing = true;
      requestAnimationFrame(() => { drawing = false; if (of === chat) follow(() => shown.get(node.id)?.()); });
    }
    if (performance.now() - saved > SAVE_MS) saved = performance.now(), await saveChat(of, node);
  }
  if (!reason) throw new Error("The connection ended before the answer did.");
  node.note = note(usage, reason, (performance.now() - began) / 1000);
  node.used = usage && usage.prompt_tokens + usage.completion_tokens;
}

function addCall(node, { index, id, function: called }) {
  const call = (node.calls[index] ??= { id, type: "function", function: { name: called.name, arguments: "" } });
  call.function.arguments += called.arguments ?? "";
}

function note(usage, reason, seconds) {
  if (!usage) return "";
  const { completion_tokens: n, prompt_tokens_details: { cached_tokens: cached }, dropped_tokens: dropped } = usage;
  return [cached && `${count(cached, "token")} from cache`, dropped && `${count(dropped, "token")} left out: the chat is longer than the context`,
    count(n, "token"), n > 1 && `${(n / seconds).toFixed(1)}/s`, reason === "length" && "cut: as long as it may be"].filter(Boolean).join(" · ");
}

async function keep(of, node) {
  of.title ||= (Object.values(of.nodes).find((each) => each.role === "user")?.content || "Attached files").slice(0, MAX_TITLE);
  await saveChat(of, node).catch((error) => tell(`This chat could not be kept: ${error.message}`));
  await showList();
}

/** The call of the shown answer that has no result yet. */
function openCall() {
  const nodes = branch(chat), last = nodes.findLastIndex((node) => node.role === "assistant");
  if (last < 0 || writings.has(chat.id)) return undefined;
  const given = nodes.slice(last + 1);
  return given.every((node) => node.role === "tool") ? nodes[last].calls[given.length] : undefined;
}

async function send(content, pictures, files, parent = chat.shown) {
  const of = chat, call = parent === chat.shown ? openCall() : undefined;
  const fields = call ? { role: "tool", content, call: call.id } : { role: "user", content, images: pictures, texts: files };
  const node = addNode(of, parent, fields);
  if (location.hash !== "#" + of.id) history.pushState(null, "", "#" + of.id);
  if (!call || !openCall()) return answer(of, node.id);
  await keep(of, null);
  show();
}

// --- drawing ---

function tell(text) {
  $("state").textContent = text;
}

function show(toEnd = true) {
  const nodes = branch(chat), busy = writings.has(chat.id), call = openCall();
  shown.clear();
  follow(() => $("log").replaceChildren(...(nodes.length ? nodes.map(article) : [hello()])), toEnd);
  $("title").textContent = chat.title || "New chat";
  document.title = `${chat.title || "New chat"} – mixedkv`;
  $("send").textContent = busy ? "Stop" : "Send";
  $("text").placeholder = call ? `Result of ${call.function.name}` : isBase(chat) ? "Text to continue" : "Message";
  showSettings();
}

function hello() {
  const enter = touches() ? "Enter begins a new line. The button sends." : "Enter sends, Shift+Enter begins a new line.";
  return make("div", "empty soft", make("h3", "", isBase(chat) ? "This model continues your text" : "What is on your mind?"),
    make("p", "", (isBase(chat) ? "It is a base model, which is not tuned for chat. " : "") + enter));
}

/** Change the log; its end stays in view if it was, or with `always`. */
function follow(change, always = false) {
  const log = $("log"), atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  change();
  if (always || atEnd) log.scrollTop = log.scrollHeight;
}

function article(node) {
  const body = make("div", "body"), feet = make("div", "feet"), element = make("article", node.role);
  const thought = make("details", "", make("summary", "", "Thoughts"), make("div", "body")), calls = make("div", "body");
  element.setAttribute("aria-label", { user: "You", tool: "Result of a tool", assistant: "Answer" }[node.role]);
  element.append(...(node.images?.length ? [make("div", "images", ...node.images.map((url) => picture(url)))] : []));
  if (node.role === "assistant") element.append(thought, body, calls, feet);
  else element.append(...(node.texts ?? []).map(attached), ...(node.content ? [body] : []), feet), fold(body, node.content);
  const draw = () => {
    feet.replaceChildren(...foot(node, element));
    if (node.role !== "assistant") return;
    showMarkdown(body, node.content);
    showMarkdown(thought.lastChild, node.reasoning);
    thought.hidden = !node.reasoning;
    body.classList.toggle("waits", writings.get(chat.id)?.node === node);
    calls.replaceChildren(...node.calls.filter(Boolean).map((each) => codeBlock(each.function.arguments, "calls " + each.function.name)));
  };
  shown.set(node.id, draw);
  draw();
  return element;
}

/** An attached text, closed. */
function attached({ name, text }) {
  const lines = text.split("\n").length;
  return make("details", "", make("summary", "", `${name} (${count(lines, "line")})`), make("pre", "", text));
}

/** A long message shows its beginning, and all of it when asked. */
function fold(body, text) {
  body.textContent = text.length > LONG_MESSAGE ? text.slice(0, LONG_MESSAGE) + "…" : text;
  if (text.length > LONG_MESSAGE) {
    const more = button("Show all", "Show the whole message", () => { body.textContent = text; });
    body.append(make("div", "", more));
  }
}

function picture(url) {
  const image = make("img");
  image.alt = "Attached image";
  image.src = url;
  return image;
}

function foot(node, element) {
  if (writings.get(chat.id)?.node === node) return node.progress ? [make("span", "soft", node.progress)] : [];
  const out = [], same = children(chat, node.parent), at = same.indexOf(node);
  if (same.length > 1) {
    const turn = (to, label, sign) => {
      const one = button(sign, label, async () => {
        const of = chat;
        of.shown = tip(of, same[to].id);
        await keep(of, null);
        if (of === chat) show();
      });
      one.disabled = !same[to];
      return one;
    };
    out.push(turn(at - 1, "The version before", "‹"), make("span", "soft", `${at + 1} of ${same.length}`), turn(at + 1, "The next version", "›"));
  }
  if (node.role === "assistant") {
    const said = { stopped: "Stopped", writing: "Not finished: it is written in another tab, or the page was closed" }[node.state];
    if (node.error) out.push(make("span", "alert", node.error));
    out.push(make("span", "soft", node.note || said || ""));
    out.push(button("Regenerate", "Regenerate this answer", () => idle() && answer(chat, node.parent)));
  } else if (node.role === "user") out.push(button("Edit", "Edit and begin a branch", () => idle() && edit(node, element)));
  if (node.content) out.push(button("Copy", "Copy the text", (event) => copy(node.content, event.target)));
  return out;
}

function button(text, label, pressed) {
  const element = make("button", "plain", text);
  element.type = "button";
  element.setAttribute("aria-label", label);
  element.addEventListener("click", pressed);
  return element;
}

const idle = () => !writings.has(chat.id);

function edit(node, element) {
  const text = make("textarea"), ok = make("button", "main", "Send"), cancel = button("Cancel", "Cancel", () => show(false));
  const form = make("form", "", text, make("div", "row", ok, cancel));
  text.value = node.content;
  text.setAttribute("aria-label", "Edited message");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (text.value.trim() || node.images?.length || node.texts?.length) send(text.value.trim(), node.images, node.texts, node.parent);
  });
  text.addEventListener("keydown", (event) => enterSends(event, form));
  element.replaceChildren(form);
  text.focus();
}

async function copy(text, from) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // a page without TLS has no clipboard
    const area = make("textarea", "", text);
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  from.textContent = "Copied";
  setTimeout(() => { from.textContent = "Copy"; }, 1500);
}

async function showList() {
  const list = await listChats($("find").value.trim());
  $("chats").replaceChildren(...list.map(({ id, title }) => {
    const link = make("a", "", title), item = make("li", id === chat.id ? "here" : "", link);
    link.href = "#" + id;
    if (id === chat.id) link.setAttribute("aria-current", "page");
    item.append(button("✎", `Rename ${title}`, () => rename(id, title)));
    item.append(button("✕", `Delete ${title}`, async () => {
      if (!confirm(`Delete the chat “${title}”?`)) return;
      writings.get(id)?.abort.abort();
      await deleteChat(id);
      id === chat.id ? begin() : showList();
    }));
    return item;
  }));
}

async function rename(id, title) {
  const name = prompt("Name of this chat", title)?.trim().slice(0, MAX_TITLE);
  const of = id === chat.id ? chat : writings.get(id)?.chat ?? (await loadChat(id));
  if (!name || !of) return;
  of.title = name;
  await keep(of, writings.get(id)?.node ?? null);
  if (of === chat) show(false);
}

/** Save the shown branch as Markdown. */
function exportChat() {
  const heads = { user: "You", assistant: "Answer", tool: "Result of a tool" };
  const parts = branch(chat).map((node) => `## ${heads[node.role]}\n\n${whole(node)}`);
  if (chat.settings.system) parts.unshift(`## System prompt\n\n${chat.settings.system}`);
  const link = make("a");
  link.href = URL.createObjectURL(new Blob([`# ${chat.title}\n\n${parts.join("\n\n")}\n`], { type: "text/markdown" }));
  link.download = `${chat.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "") || "chat"}.md`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

// --- which chat, with which settings ---

async function open(id) {
  document.body.classList.remove("side-open");
  chat = writings.get(id)?.chat ?? (id ? await loadChat(id) : null) ?? newChat();
  show();
  await showList();
}

function begin() {
  history.pushState(null, "", location.pathname + location.search);
  $("text").focus();
  return open("");
}

/** Another tab has changed a chat. */
async function changed(id) {
  await showList();
  if (id !== chat.id || !chat.kept) return;
  const stored = await loadChat(id);
  if (!stored) return writings.has(id) ? undefined : begin();
  merge(chat, stored, writings.get(id)?.node);
  if (!idle() || document.querySelector("article form")) return;
  chat.shown = tip(chat, chat.shown);
  show(false);
}

function showSettings() {
  const model = models.find((each) => each.id === chat.settings.model) ?? models[0];
  $("model").hidden = !models.length;
  if (model) $("model").value = model.id;
  const used = branch(chat).findLast((node) => node.used)?.used, most = model?.meta.n_ctx;
  $("used").hidden = !(used && most);
  if (used && most) {
    Object.assign($("meter"), { max: most, high: 0.8 * most, value: used });
    $("tokens").textContent = `${new Intl.NumberFormat("en").format(used)} of ${count(most, "token")}`;
  }
  $("export").hidden = !branch(chat).length;
  if (!branch(chat).length) $("log").replaceChildren(hello()), ($("text").placeholder = isBase(chat) ? "Text to continue" : "Message");
}

function readSettings() {
  const settings = { model: chat.settings.model, system: $("system").value.trim() };
  for (const name of NUMBERS) if ($(name).value) settings[name] = Number($(name).value);
  if ($("tools").value.trim()) settings.tools = JSON.parse($("tools").value);
  return settings;
}

const sees = () => (models.find((each) => each.id === chat.settings.model) ?? models[0])?.meta.capabilities.includes("vision");

// --- attached files. Images are made smaller here, which also leaves out what a camera has written into the file ---

async function attach(files) {
  for (const file of files) {
    if (!file.type.startsWith("image/")) { await attachText(file); continue; }
    if (!sees()) { tell(`${file.name}: this model takes no images.`); continue; }
    try {
      const bitmap = await createImageBitmap(file), scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
      const canvas = make("canvas");
      [canvas.width, canvas.height] = [bitmap.width, bitmap.height].map((side) => Math.max(1, Math.round(side * scale)));
      canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
      images.push(file.type === "image/jpeg" ? canvas.toDataURL("image/jpeg", 0.9) : canvas.toDataURL("image/png"));
    } catch {
      tell(`${file.name} is no image that this browser can read.`);
    }
  }
  showAttached();
}

async function attachText(file) {
  if (file.size > MAX_FILE) return tell(`${file.name} has more than ${MAX_FILE / 1e6} MB.`);
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (text.includes("\0")) throw new TypeError();
    texts.push({ name: file.name, text });
  } catch {
    tell(`${file.name} is no text in UTF-8.`);
  }
}

function showAttached() {
  $("images").hidden = !images.length && !texts.length;
  const pictures = images.map((url, i) => {
    const remove = button("", "Remove this image", () => { images.splice(i, 1); showAttached(); });
    remove.append(picture(url));
    return remove;
  });
  const files = texts.map(({ name, text }, i) => {
    const remove = button(`${name} (${count(text.split("\n").length, "line")}) ✕`, `Remove ${name}`, () => { texts.splice(i, 1); showAttached(); });
    remove.className = "file";
    return remove;
  });
  $("images").replaceChildren(...pictures, ...files);
}

// --- what people do ---

const touches = () => matchMedia("(pointer: coarse)").matches;

function enterSends(event, form) {
  const alone = event.key === "Enter" && !event.shiftKey && !event.isComposing && !touches();
  if (alone) event.preventDefault(), form.requestSubmit();
}

function fit() {
  $("text").style.height = "auto";
  $("text").style.height = `${$("text").scrollHeight + 2}px`;
  tab.set(DRAFT, $("text").value);
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const content = $("text").value.trim(), pictures = images, files = texts;
  if (event.submitter && !idle()) return writings.get(chat.id).abort.abort();
  if (!idle() || (!content && !pictures.length && !files.length)) return;
  $("text").value = "";
  images = [];
  texts = [];
  fit();
  showAttached();
  tell("");
  send(content, pictures, files);
});
$("text").addEventListener("keydown", (event) => enterSends(event, $("ask")));
$("text").addEventListener("input", fit);
$("text").addEventListener("paste", (event) => {
  const files = [...event.clipboardData.files], text = event.clipboardData.getData("text/plain");
  if (files.length) return event.preventDefault(), void attach(files);
  if (text.length <= LONG_PASTE) return;
  event.preventDefault();
  const n = texts.filter(({ name }) => name.startsWith("Pasted text")).length;
  texts.push({ name: n ? `Pasted text ${n + 1}` : "Pasted text", text });
  showAttached();
});
$("find").addEventListener("input", showList);
$("export").addEventListener("click", exportChat);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) writings.get(chat.id)?.abort.abort();
});
for (const name of ["dragover", "drop"]) {
  document.addEventListener(name, (event) => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    if (name === "drop") attach(event.dataTransfer.files);
  });
}
$("attach").addEventListener("click", () => $("files").click());
$("files").addEventListener("change", async () => { await attach($("files").files); $("files").value = ""; });
$("log").addEventListener("click", (event) => {
  const code = event.target.closest(".copy")?.closest(".code");
  if (code) copy(code.querySelector("code").textContent, event.target);
});
$("new").addEventListener("click", begin);
$("open-side").addEventListener("click", () => { document.body.classList.add("side-open"); $("close-side").focus(); });
$("close-side").addEventListener("click", () => { document.body.classList.remove("side-open"); $("open-side").focus(); });
$("forget").addEventListener("click", () => { useKey(""); loadModels(); });
$("key").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = $("secret").value.trim();
  if (!/^[\x21-\x7e]+$/.test(key)) return void ($("refused").textContent = "A key has no spaces, and no letters beyond ASCII.");
  secret = key;
  $("secret").value = "";
  loadModels();
});
$("model").addEventListener("change", () => {
  chat.settings.model = $("model").value;
  showSettings();
  if (chat.kept) keep(chat, null);
});
$("open-settings").addEventListener("click", () => {
  const { system = "", tools } = chat.settings;
  $("system").value = system;
  for (const name of NUMBERS) $(name).value = chat.settings[name] ?? "";
  $("tools").value = tools ? JSON.stringify(tools, null, 1) : "";
  $("wrong").textContent = "";
  $("settings").showModal();
});
$("settings").querySelector("form").addEventListener("submit", (event) => {
  try {
    chat.settings = readSettings();
    if (chat.kept) keep(chat, null);
  } catch (error) {
    event.preventDefault();
    $("wrong").textContent = `Tools: ${error.message}`;
  }
});
addEventListener("popstate", () => open(location.hash.slice(1)));

secret = tab.get(KEY);
$("text").value = tab.get(DRAFT);
fit();
if (!(await openChats(changed))) $("kept").textContent = "This browser keeps no chats: they are gone with this page.";
await open(location.hash.slice(1));
await loadModels();
