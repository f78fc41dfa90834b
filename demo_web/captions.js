/**
 * The transcript as a value: server messages in, segments and stretches of speech out.
 * Pure. Knows the message fields of PROTOCOL.md; does not know the page. Objects that did not change stay the same
 * objects, so that a view can tell by identity what to draw again.
 */

/**
 * @typedef {{text: string, start_s: number | null, end_s: number | null, confidence: number | null}} Word
 * @typedef {{segment_id: number, revision: number, words: Word[], n_committed: number, start_s: number, end_s: number,
 *   language: string | null, reason: string | null}} Segment final once it has a reason
 * @typedef {{start_s: number, end_s: number | null}} Speech open while `end_s` is null
 * @typedef {{segments: Segment[], speech: Speech[]}} Captions
 */

/** @type {Captions} */
export const NO_CAPTIONS = Object.freeze({ segments: Object.freeze([]), speech: Object.freeze([]) });

/**
 * The captions after one more message. Messages of other types change nothing.
 * @param {Captions} captions
 * @param {object} message
 * @returns {Captions}
 */
export function reduce(captions, message) {
  switch (message.type) {
    case "partial":
    case "final":
      return withSegment(captions, segmentOf(message));
    case "speech_started":
      return { ...captions, speech: [...captions.speech, { start_s: message.start_s, end_s: null }] };
    case "speech_ended":
      return endSpeech(captions, message.end_s);
    case "bye":
      return endSpeech(captions, message.audio_s);
    default:
      return captions;
  }
}

/** @param {Captions} captions */
export function isSpeaking(captions) {
  return captions.speech.at(-1)?.end_s === null;
}

/** @param {Segment} segment */
export function isFinal(segment) {
  return segment.reason !== null;
}

/**
 * The segments as far as they are settled: finals, and what is committed of those still open.
 * @param {Captions} captions
 * @returns {Segment[]}
 */
export function settled(captions) {
  const committed = (segment) => ({ ...segment, words: segment.words.slice(0, segment.n_committed) });
  return captions.segments.map(committed).filter((segment) => segment.words.length > 0);
}

/** The words of a segment as text; each word brings its own white space. */
export function textOf(words) {
  return words.map((word) => word.text).join("").trim();
}

/** The settled text, a paragraph a segment. */
export function plainText(captions) {
  return settled(captions).map((segment) => textOf(segment.words)).join("\n\n");
}

function segmentOf(message) {
  return {
    segment_id: message.segment,
    revision: message.revision,
    words: message.words,
    n_committed: message.n_committed,
    start_s: message.start_s,
    end_s: message.end_s,
    language: message.language,
    reason: message.type === "final" ? message.reason : null,
  };
}

/** Put a segment in its place. An outdated one is dropped; a final without words takes its partials back. */
function withSegment(captions, segment) {
  const known = captions.segments.find((other) => other.segment_id === segment.segment_id);
  if (known && (isFinal(known) || (!isFinal(segment) && known.revision >= segment.revision))) return captions;
  const others = captions.segments.filter((other) => other !== known);
  if (segment.words.length === 0) return { ...captions, segments: others };
  const place = others.findLastIndex((other) => other.segment_id < segment.segment_id) + 1;
  return { ...captions, segments: others.toSpliced(place, 0, segment) };
}

function endSpeech(captions, end_s) {
  if (!isSpeaking(captions)) return captions;
  const open = captions.speech.at(-1);
  return { ...captions, speech: [...captions.speech.slice(0, -1), { ...open, end_s: Math.max(end_s, open.start_s) }] };
}
