/**
 * How long words take: from sending the audio of a word's end to showing the word.
 * Knows sample positions and wall times that it is told; reads no clock. What can't be measured is null, never a guess.
 */

const KEPT_MS = 120_000; // how far back a word may end and still be measured
const SAME_WORD_S = 0.5; // decoding again moves a word's end by less than this

/** When each position of the audio was handed over for sending. Held-up audio counts from then, so outages show. */
export class SentTimeline {
  #marks = []; // {end_sample, at_ms}, both rising
  #nDropped = 0;

  /** @param {number} end_sample just behind the frame @param {number} at_ms wall time */
  record(end_sample, at_ms) {
    this.#marks.push({ end_sample, at_ms });
    while (this.#marks[this.#nDropped].at_ms < at_ms - KEPT_MS) this.#nDropped += 1;
    if (this.#nDropped > 1024) this.#forget();
  }

  /**
   * Wall time at which the frame that holds everything up to `end_sample` was sent; null if it was not sent yet, or
   * too long ago to be remembered.
   */
  sentAt(end_sample) {
    let low = this.#nDropped;
    let high = this.#marks.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.#marks[middle].end_sample < end_sample) low = middle + 1;
      else high = middle;
    }
    const isForgotten = low === this.#nDropped && this.#nDropped > 0;
    return low === this.#marks.length || isForgotten ? null : this.#marks[low].at_ms;
  }

  /** The session began anew: what was position `n_samples` is position 0 now. */
  rebase(n_samples) {
    this.#marks = this.#marks.map((mark) => ({ ...mark, end_sample: mark.end_sample - n_samples }));
  }

  #forget() {
    this.#marks = this.#marks.slice(this.#nDropped - 1);
    this.#nDropped = 1; // one mark stays to say where the oldest remembered one begins
  }
}

/** The median of the newest values. */
export class RecentMedian {
  #values = [];
  #nKept;

  constructor(nKept) {
    this.#nKept = nKept;
  }

  add(value) {
    this.#values.push(value);
    if (this.#values.length > this.#nKept) this.#values.shift();
  }

  get count() {
    return this.#values.length;
  }

  /** @returns {number | null} */
  get value() {
    if (this.#values.length === 0) return null;
    const sorted = [...this.#values].sort((a, b) => a - b);
    const middle = sorted.length >> 1;
    return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
  }
}

/**
 * The words of `current` that `previous` did not show: new ones, and ones that were another word before.
 * A word that only moved a little, or slid along because one before it was split, is not new.
 * @param {import("./captions.js").Word[]} previous
 * @param {import("./captions.js").Word[]} current
 */
export function newlyShown(previous, current) {
  const left = [...previous];
  return current.filter((word) => {
    const index = left.findIndex((other) => isSameWord(other, word));
    if (index >= 0) left.splice(index, 1);
    return index < 0;
  });
}

function isSameWord(one, other) {
  if (one.text.trim() !== other.text.trim()) return false;
  return one.end_s === null || other.end_s === null || Math.abs(one.end_s - other.end_s) < SAME_WORD_S;
}

/** The words that `current` shows as committed and `previous` did not. */
export function newlySettled(previous, current) {
  return current.words.slice(previous?.n_committed ?? 0, current.n_committed);
}
