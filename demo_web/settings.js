/**
 * The settings form: filled from what the server offers, read as fields of `hello` and `update`.
 * Knows the form's controls and the models' capabilities. What a model can't do is disabled and says why.
 */

import { languageName } from "./explain.js";

/** What this page shows where a model offers it. */
const PREFERRED = ["word_times", "confidence", "punctuation", "language_id"];

/** What may change while a session runs. */
const CHANGEABLE = ["language", "translate", "vocabulary", "hangover_ms", "partial_interval_ms"];
const RANGES = ["hangover_ms", "partial_interval_ms"];
const PROCESSING = ["echoCancellation", "noiseSuppression", "autoGainControl"];

const CAPABILITY_NAMES = {
  word_times: "word times",
  confidence: "confidence",
  punctuation: "punctuation",
  vocabulary: "vocabulary",
  context: "context",
  language_choice: "language choice",
  language_id: "language detection",
  translation: "translation",
};

/** Terms divided by commas or line ends; each once. */
export function termsOf(text) {
  return [...new Set(text.split(/[,\n]/).map((term) => term.trim()))].filter((term) => term !== "");
}

function languageOptions(codes) {
  if (codes.length === 1) return [new Option(`${languageName(codes[0])} only`, "")];
  const named = codes.map((code) => new Option(languageName(code), code));
  named.sort((one, other) => one.text.localeCompare(other.text));
  return [new Option("Detect by itself", ""), ...named];
}

export class Settings {
  #form;
  #models = [];

  /**
   * @param {HTMLFormElement} form with controls named `model`, `language`, `translate`, `vocabulary`, `hangover_ms`,
   *   `partial_interval_ms`, `echoCancellation`, `noiseSuppression`, `autoGainControl`
   * @param {(fields: object) => void} onUpdate told the fields of an `update` when they change
   */
  constructor(form, onUpdate) {
    this.#form = form;
    this.#control("model").addEventListener("change", () => this.#showModel());
    for (const name of CHANGEABLE) {
      this.#control(name).addEventListener("change", () => onUpdate(this.#fieldsOf(name)));
    }
    for (const name of RANGES) {
      this.#control(name).addEventListener("input", () => this.#showRange(name));
      this.#showRange(name);
    }
    form.addEventListener("submit", (event) => event.preventDefault());
  }

  /** @param {{name: string, languages: string[], capabilities: string[]}[]} models the server's default first */
  offer(models) {
    if (JSON.stringify(models) === JSON.stringify(this.#models)) return;
    this.#models = models;
    const select = this.#control("model");
    const chosen = select.value;
    select.replaceChildren(...models.map(({ name }) => new Option(name, name)));
    if (models.some(({ name }) => name === chosen)) select.value = chosen;
    this.#showModel();
  }

  /** The fields of `hello` beside `audio`. */
  get hello() {
    const model = this.#model ? { model: this.#model.name } : {};
    return { ...model, ...this.#fieldsOf(...CHANGEABLE), prefer: PREFERRED };
  }

  /** What the browser does to the microphone's sound. */
  get processing() {
    return Object.fromEntries(PROCESSING.map((name) => [name, this.#control(name).checked]));
  }

  /** The model and the microphone's processing hold for a whole session. */
  setRunning(isRunning) {
    const reason = isRunning ? "Stop to change it." : "";
    for (const name of ["model", ...PROCESSING]) this.#disable(name, reason);
  }

  get #model() {
    return this.#models.find(({ name }) => name === this.#control("model").value);
  }

  #control(name) {
    return this.#form.elements[name];
  }

  /** Wire fields of those controls that the model can honour. */
  #fieldsOf(...names) {
    const value = (name) => this.#control(name).value;
    const fields = {
      language: () => ({ language: value("language") || null }),
      translate: () => ({ task: this.#control("translate").checked ? "translate" : "transcribe" }),
      vocabulary: () => ({ vocabulary: termsOf(value("vocabulary")) }),
      hangover_ms: () => ({ hangover_ms: Number(value("hangover_ms")) }),
      partial_interval_ms: () => ({ partial_interval_ms: Number(value("partial_interval_ms")) }),
    };
    return Object.assign({}, ...names.filter((name) => !this.#control(name).disabled).map((name) => fields[name]()));
  }

  #showModel() {
    const model = this.#model;
    if (!model) return;
    const lacks = (capability) => !model.capabilities.includes(capability);
    this.#showLanguages(model);
    this.#disable("vocabulary", lacks("vocabulary") ? `${model.name} can't be told which words to expect.` : "");
    this.#disable("translate", lacks("translation") ? `${model.name} does not translate.` : "");
    this.#showCapabilities(model);
  }

  #showLanguages({ name, languages, capabilities }) {
    const [isOnly, isChoice] = [languages.length === 1, capabilities.includes("language_choice")];
    const select = this.#control("language");
    const chosen = select.value;
    select.replaceChildren(...languageOptions(languages));
    if (!isOnly && languages.includes(chosen)) select.value = chosen;
    this.#disable("language", isOnly || isChoice ? "" : `${name} always detects the language.`);
    select.disabled = isOnly || !isChoice; // a sole choice says enough by itself
  }

  #showCapabilities({ capabilities }) {
    const items = Object.entries(CAPABILITY_NAMES).map(([capability, label]) => {
      const item = document.createElement("li");
      const has = capabilities.includes(capability);
      item.dataset.offered = has;
      item.textContent = label;
      item.title = has ? `This model offers ${label}` : `This model does not offer ${label}`;
      return item;
    });
    this.#form.querySelector("[data-part=capabilities]").replaceChildren(...items);
  }

  /** Disable a control and say why beside it; an empty reason enables it. */
  #disable(name, reason) {
    const control = this.#control(name);
    control.disabled = reason !== "";
    const note = this.#form.querySelector(`[data-reason="${name}"]`);
    if (note) note.textContent = reason;
    else control.title = reason;
  }

  #showRange(name) {
    const output = this.#form.querySelector(`output[for="${this.#control(name).id}"]`);
    output.textContent = `${(Number(this.#control(name).value) / 1000).toFixed(1)} s`;
  }
}
