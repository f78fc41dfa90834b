/**
 * One session's transcript on the page: a heading with downloads, and a paragraph a segment.
 * Knows the DOM and the captions value. Draws only what changed, so that selections and tooltips live on.
 */

import { isFinal, plainText, settled, textOf } from "./captions.js";
import { languageName } from "./explain.js";
import { cuesOf, toSrt, toVtt } from "./subtitles.js";

const UNSURE_CONFIDENCE = 0.5; // words below it are marked in finals
const LATEST_PX = 48; // this near to the end counts as following along

/** `0:07`, `1:02:03`. */
export function shortTime(time_s) {
  const total = Math.floor(time_s);
  const pad = (value) => String(value).padStart(2, "0");
  const [hours, minutes, seconds] = [Math.floor(total / 3600), Math.floor(total / 60) % 60, total % 60];
  return hours > 0 ? `${hours}:${pad(minutes)}:${pad(seconds)}` : `${minutes}:${pad(seconds)}`;
}

export class TranscriptView {
  #captions = null;
  #shown = new Map(); // segment_id → {segment, paragraph}
  #name;

  /**
   * @param {HTMLTemplateElement} template
   * @param {{name: string, detail: string}} source where the audio comes from
   * @param {(text: string) => void} announce tells what was done
   */
  constructor(template, source, announce) {
    this.element = template.content.firstElementChild.cloneNode(true);
    this.#name = source.name;
    this.#part("name").textContent = source.name;
    this.#part("detail").textContent = source.detail;
    this.#part("copy").addEventListener("click", () => this.#copy(announce));
    this.#part("srt").addEventListener("click", () => this.#download("srt", "application/x-subrip", toSrt));
    this.#part("vtt").addEventListener("click", () => this.#download("vtt", "text/vtt", toVtt));
  }

  /** Show `captions`, which follow from those shown before. */
  show(captions) {
    const before = this.#captions?.segments;
    this.#captions = captions;
    if (captions.segments === before) return;
    const kept = new Set(captions.segments.map((segment) => segment.segment_id));
    for (const [segment_id, { paragraph }] of this.#shown) {
      if (!kept.has(segment_id)) this.#remove(segment_id, paragraph);
    }
    for (const segment of captions.segments) this.#showSegment(segment);
    this.#showTools();
  }

  #part(name) {
    return this.element.querySelector(`[data-part="${name}"]`);
  }

  #remove(segment_id, paragraph) {
    paragraph.remove();
    this.#shown.delete(segment_id);
  }

  #showSegment(segment) {
    const known = this.#shown.get(segment.segment_id);
    if (known?.segment === segment) return;
    const paragraph = known?.paragraph ?? this.#addParagraph(segment);
    paragraph.dataset.state = isFinal(segment) ? "final" : "partial";
    paragraph.querySelector("time").textContent = shortTime(segment.start_s);
    const text = paragraph.querySelector(".words");
    if (segment.language) text.lang = segment.language;
    showWords(text, segment);
    this.#shown.set(segment.segment_id, { segment, paragraph });
  }

  #addParagraph(segment) {
    const paragraph = this.#part("paragraph").content.firstElementChild.cloneNode(true);
    const ids = [...this.#shown.keys()].filter((id) => id < segment.segment_id);
    const previous = ids.length > 0 ? this.#shown.get(Math.max(...ids)).paragraph : null;
    if (previous) previous.after(paragraph);
    else this.#part("paragraphs").prepend(paragraph);
    return paragraph;
  }

  #showTools() {
    const isEmpty = settled(this.#captions).length === 0;
    for (const name of ["copy", "srt", "vtt"]) this.#part(name).disabled = isEmpty;
    const language = this.#captions.segments.at(-1)?.language;
    this.#part("language").textContent = language ? languageName(language) : "";
  }

  async #copy(announce) {
    try {
      await navigator.clipboard.writeText(plainText(this.#captions));
      announce("Text copied.");
    } catch {
      announce("The browser did not allow copying. Select the text and copy it by hand.");
    }
  }

  #download(extension, type, format) {
    const blob = new Blob([format(cuesOf(settled(this.#captions)))], { type: `${type};charset=utf-8` });
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = `${this.#name.replace(/\.[a-z0-9]{2,4}$/i, "")}.${extension}`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000); // some browsers read the link after the click returns
  }
}

/** One span a word, changed in place. */
function showWords(element, segment) {
  segment.words.forEach((word, index) => {
    const span = element.children[index] ?? element.appendChild(document.createElement("span"));
    const isCommitted = isFinal(segment) || index < segment.n_committed;
    span.className = classOf(word, isCommitted, isFinal(segment));
    showText(span, index === 0 ? word.text.trimStart() : word.text);
    span.title = titleOf(word);
  });
  while (element.children.length > segment.words.length) element.lastElementChild.remove();
}

/** The space before a word stands apart from it, so that marks on the word don't reach into the gap. */
function showText(span, text) {
  if (span.textContent === text) return;
  const ink = document.createElement("span");
  ink.className = "ink";
  ink.textContent = text.trimStart();
  span.replaceChildren(text.slice(0, text.length - ink.textContent.length), ink);
}

function classOf(word, isCommitted, isDone) {
  if (!isCommitted) return "word tentative";
  const isUnsure = isDone && word.confidence !== null && word.confidence < UNSURE_CONFIDENCE;
  return isUnsure ? "word committed unsure" : "word committed";
}

function titleOf(word) {
  const times = word.start_s === null ? [] : [`${word.start_s.toFixed(2)}–${word.end_s.toFixed(2)} s`];
  const confidence = word.confidence === null ? [] : [`${Math.round(word.confidence * 100)} % sure`];
  return [...times, ...confidence].join(", ");
}

/** Keeps the newest words in sight, unless the reader went back to older ones. */
export class Follower {
  #scroller;
  #jump;
  #isFollowing = true;

  /** @param {HTMLElement} scroller @param {HTMLButtonElement} jump shown while not following */
  constructor(scroller, jump) {
    this.#scroller = scroller;
    this.#jump = jump;
    scroller.addEventListener("scroll", () => this.#setFollowing(this.#distance_px() < LATEST_PX), { passive: true });
    jump.addEventListener("click", () => this.toLatest());
  }

  /** Call it after the content changed. */
  contentChanged() {
    if (this.#isFollowing) this.#scroller.scrollTop = this.#scroller.scrollHeight;
  }

  toLatest() {
    this.#setFollowing(true);
    this.contentChanged();
  }

  #distance_px() {
    return this.#scroller.scrollHeight - this.#scroller.scrollTop - this.#scroller.clientHeight;
  }

  #setFollowing(isFollowing) {
    this.#isFollowing = isFollowing;
    this.#jump.hidden = isFollowing;
  }
}

/** Tells screen readers each final once; partials would only talk over each other. */
export function announceFinal(region, segment) {
  const line = document.createElement("p");
  line.textContent = textOf(segment.words);
  if (segment.language) line.lang = segment.language;
  region.append(line);
  while (region.children.length > 5) region.firstElementChild.remove();
}
