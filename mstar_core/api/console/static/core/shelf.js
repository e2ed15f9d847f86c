// History in the browser's IndexedDB, one shelf per deployment and kind. Without permission it stays in memory.

import { hasKey } from "./net.js";

const DATABASE = "mstarctl";
const STORE = "items";
const CHOICE = "mstarctl.keep";
const CLEARED = "history-cleared";

/** Return whether history is written to this browser. With an API key only if the user chose so. */
export function isKept() {
  let chosen;
  try { chosen = localStorage.getItem(CHOICE); } catch { return false; } // the browser blocks storage
  return chosen === null ? !hasKey() : chosen === "yes";
}

/** Write the choice. Without it the history on disk is removed. */
export async function keep(isWanted) {
  try { localStorage.setItem(CHOICE, isWanted ? "yes" : "no"); } catch { return; }
  if (!isWanted) await clearDatabase();
}

/** Forget the history of all deployments that this address has served, and notify the page. */
export async function forget() {
  await clearDatabase();
  window.dispatchEvent(new Event(CLEARED));
}

export function onForget(listener) { window.addEventListener(CLEARED, listener); }

function opened() {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(DATABASE, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: ["shelf", "id"] });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/** Run `act` on the store in a transaction and return the result of its request. */
async function transact(mode, act) {
  const database = await opened();
  try {
    return await new Promise((resolve, reject) => {
      const transaction = database.transaction(STORE, mode);
      const request = act(transaction.objectStore(STORE));
      transaction.oncomplete = () => resolve(request?.result);
      transaction.onabort = transaction.onerror = () => reject(transaction.error);
    });
  } finally {
    database.close();
  }
}

/** Erase with `act`. A browser without storage has nothing to erase. */
const erased = (act) => transact("readwrite", act).catch(() => {});
const clearDatabase = () => erased((store) => store.clear());

/** The newest items of one kind. An item is plain data and blobs with an `id` that grows with time. */
export class Shelf {
  constructor(deployment, kind, most = 24) {
    this.name = `${deployment}/${kind}`;
    this.most = most;
  }

  get range() { return IDBKeyRange.bound([this.name], [this.name, []]); }

  /** Return the items, newest first. A browser without storage has none. */
  async all() {
    if (!isKept()) return [];
    try {
      return (await transact("readonly", (store) => store.getAll(this.range))).reverse();
    } catch {
      return [];
    }
  }

  /** Write an item and drop the oldest beyond the limit. A full or blocked disk loses history, not the answer. */
  async put(item) {
    if (!isKept()) return;
    try {
      await transact("readwrite", (store) => store.put({ ...item, shelf: this.name }));
      for (const old of (await this.all()).slice(this.most)) await this.remove(old.id);
    } catch { /* see above */ }
  }

  remove(id) { return erased((store) => store.delete([this.name, id])); }
  clear() { return erased((store) => store.delete(this.range)); }
}

let last = 0;

/** Return a new id: milliseconds of the clock, made unique. */
export function newId() {
  last = Math.max(last + 1, Date.now());
  return last;
}
