// The chats of this browser, in its IndexedDB: {id, title, time, settings, shown, nodes: {id: node}}. A chat is a tree of
// messages, since an edited message begins a branch; `shown` is the last message of the branch on the page.

let database = null; // null where the browser keeps nothing: chats then live as long as the page
const loose = new Map(), tabs = new BroadcastChannel("mixedkv-chats");
const done = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});
const committed = (transaction) => new Promise((resolve, reject) => {
  transaction.oncomplete = resolve;
  transaction.onabort = () => reject(transaction.error);
});
const chats = (mode = "readonly") => database.transaction("chats", mode).objectStore("chats");

/** Open the database; whether chats are kept. `changed(id)` is called when another tab has changed a chat. */
export async function openChats(changed) {
  tabs.onmessage = (event) => changed(String(event.data));
  try {
    const request = indexedDB.open("mixedkv", 1);
    request.onupgradeneeded = () => request.result.createObjectStore("chats", { keyPath: "id" });
    database = await done(request);
  } catch { /* a private window of some browsers */ }
  return database !== null;
}

export const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(9)), (x) => x.toString(36).padStart(2, "0")).join("");
export const newChat = () => ({ id: newId(), title: "", time: Date.now(), settings: {}, shown: null, nodes: {}, kept: false });

/** Title and time of each chat, the latest first; with a text those that have it in their title or a message. */
export async function listChats(text = "") {
  const all = database ? await done(chats().getAll()) : [...loose.values()], sought = text.toLowerCase();
  const has = (chat) => [chat.title, ...Object.values(chat.nodes).map((node) => node.content)].some((each) => each.toLowerCase().includes(sought));
  return all.filter((chat) => !sought || has(chat)).map(({ id, title, time }) => ({ id, title, time })).sort((a, b) => b.time - a.time);
}

export async function loadChat(id) {
  return (database ? await done(chats().get(id)) : loose.get(id)) ?? null;
}

/** Keep a chat. Its messages do not change, but for `writing`, one that this tab adds text to: so what another tab has
    added stays. A chat that another tab has deleted does not come back. */
export async function saveChat(chat, writing = null) {
  if (!database) return void loose.set(chat.id, chat);
  const store = chats("readwrite"), old = await done(store.get(chat.id));
  if (!old && chat.kept) return;
  chat.kept = true;
  merge(chat, old, writing);
  store.put(chat);
  await committed(store.transaction); // a page that is reloaded before loses what was only put
  tabs.postMessage(chat.id);
}

export function merge(chat, other, writing) {
  Object.assign(chat.nodes, other?.nodes, writing && { [writing.id]: writing });
}

export async function deleteChat(id) {
  loose.delete(id);
  if (database) {
    const store = chats("readwrite");
    store.delete(id);
    await committed(store.transaction);
  }
  tabs.postMessage(id);
}

// --- the tree ---

/** The messages from the first one to `id`. */
export function branch(chat, id = chat.shown) {
  const out = [];
  for (let node = chat.nodes[id]; node; node = chat.nodes[node.parent]) out.unshift(node);
  return out;
}

export const children = (chat, parent) => Object.values(chat.nodes).filter((node) => node.parent === parent)
  .sort((a, b) => a.time - b.time);

/** The end of the latest branch through `id`. */
export function tip(chat, id) {
  for (let next; (next = children(chat, id).at(-1)); ) id = next.id;
  return id;
}

export function addNode(chat, parent, fields) {
  const node = { id: newId(), parent, time: Date.now(), ...fields };
  chat.nodes[node.id] = node;
  chat.shown = node.id;
  chat.time = node.time;
  return node;
}
