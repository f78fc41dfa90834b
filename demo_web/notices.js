/**
 * Messages to the person at the page: one for each key, the newest words for a key replace its older ones.
 * Knows the DOM. Errors interrupt a screen reader, everything else waits its turn.
 */

const NOTE_MS = 5_000; // what needs nothing done about it goes by itself

export class Notices {
  #list;
  #shown = new Map(); // key → element

  /** @param {HTMLElement} list */
  constructor(list) {
    this.#list = list;
  }

  /** @param {string} key @param {"error" | "warning" | "note"} kind @param {string} text */
  show(key, kind, text) {
    this.clear(key);
    const item = document.createElement("div");
    item.className = "notice";
    item.dataset.kind = kind;
    item.setAttribute("role", kind === "error" ? "alert" : "status");
    item.append(wordsOf(text), this.#dismissal(key));
    this.#list.append(item);
    this.#shown.set(key, item);
    if (kind === "note") setTimeout(() => this.#shown.get(key) === item && this.clear(key), NOTE_MS);
  }

  clear(key) {
    this.#shown.get(key)?.remove();
    this.#shown.delete(key);
  }

  clearAll() {
    for (const key of [...this.#shown.keys()]) this.clear(key);
  }

  #dismissal(key) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "dismiss";
    button.setAttribute("aria-label", "Dismiss");
    button.textContent = "×";
    button.addEventListener("click", () => this.clear(key));
    return button;
  }
}

function wordsOf(text) {
  const words = document.createElement("p");
  words.textContent = text;
  return words;
}
