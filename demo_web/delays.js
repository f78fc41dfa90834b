/**
 * The delays that the page reads out, gathered from messages as they are shown.
 * Knows the captions value and the sent timeline; reads no clock. Medians of the newest words and utterances.
 */

import { RecentMedian, SentTimeline, newlySettled, newlyShown } from "./latency.js";

const N_WORDS = 50;
const N_UTTERANCES = 10;

export class Delays {
  timeline = new SentTimeline();
  shown_ms = new RecentMedian(N_WORDS); // word's end sent → word first shown
  settled_ms = new RecentMedian(N_WORDS); // word's end sent → word shown as committed
  final_ms = new RecentMedian(N_UTTERANCES); // last word's end sent → final shown
  decided_ms = new RecentMedian(N_UTTERANCES); // speech_ended came → final shown
  #rate_hz;
  #ended = []; // {end_s, came_ms} of utterances whose final is still due

  constructor(rate_hz) {
    this.#rate_hz = rate_hz;
  }

  /** The server said that an utterance is over. */
  speechEnded(end_s, came_ms) {
    this.#ended.push({ end_s, came_ms });
  }

  /**
   * A segment is on the screen.
   * @param {import("./captions.js").Segment | undefined} before the same segment as it was shown before
   * @param {import("./captions.js").Segment} now
   * @param {number} shown_at_ms
   */
  segmentShown(before, now, shown_at_ms) {
    this.#addWords(this.shown_ms, newlyShown(before?.words ?? [], now.words), shown_at_ms);
    this.#addWords(this.settled_ms, newlySettled(before, now), shown_at_ms);
    if (now.reason === "silence") this.#addFinal(now, shown_at_ms);
  }

  #addWords(median, words, shown_at_ms) {
    for (const word of words) {
      const sent_ms = word.end_s === null ? null : this.#sentAt(word.end_s);
      if (sent_ms !== null) median.add(shown_at_ms - sent_ms);
    }
  }

  /** An utterance without words has no final, so endings before this segment are left over from such. */
  #addFinal(segment, shown_at_ms) {
    this.#ended = this.#ended.filter(({ end_s }) => end_s > segment.start_s);
    const ending = this.#ended.shift();
    if (ending === undefined) return;
    this.decided_ms.add(shown_at_ms - ending.came_ms);
    // The end that the server names lies behind the voice, by the padding; the last word's end is the stricter measure.
    const sent_ms = this.#sentAt(segment.words.at(-1)?.end_s ?? ending.end_s);
    if (sent_ms !== null) this.final_ms.add(shown_at_ms - sent_ms);
  }

  #sentAt(time_s) {
    return this.timeline.sentAt(Math.round(time_s * this.#rate_hz));
  }
}
