/**
 * Settled segments as SubRip and WebVTT: cues of at most two lines of 42 columns, cut where speech allows.
 * Pure. Knows words and their times; where a model gives none, times are shared out over the segment by length.
 */

/**
 * @typedef {{start_s: number, end_s: number, lines: string[]}} Cue
 * @typedef {{text: string, start_s: number, end_s: number}} TimedWord
 */

export const MAX_LINES = 2;
export const MAX_COLUMNS = 42; // what broadcasters' subtitle guides ask for; a wide East Asian character takes two
const MAX_CUE_S = 7; // longer than this nobody keeps reading
const MIN_CUE_MS = 800; // shorter than this nobody can read
const PAUSE_S = 0.7; // a gap between words at which a new cue begins

const SENTENCE_END = /[.!?…。！？।؟]["'”’»)\]]*$/u;
const WIDE = /[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\uffe0-\uffe6]|\p{EPres}/u;
const PLAIN = /^[\x20-\x7e]*$/;
const graphemes = new Intl.Segmenter(undefined, { granularity: "grapheme" });

/**
 * @param {import("./captions.js").Segment[]} segments in order
 * @returns {Cue[]} in order, not overlapping, each longer than zero
 */
export function cuesOf(segments) {
  const cues = segments.flatMap((segment) => groupWords(timedWords(segment).flatMap(splitLongWord)).map(cueOf));
  return separate(cues);
}

/** @param {Cue[]} cues */
export function toSrt(cues) {
  const blocks = cues.map((cue, index) => [
    index + 1,
    `${clockTime(cue.start_s, ",")} --> ${clockTime(cue.end_s, ",")}`,
    ...cue.lines.map(srtText),
  ]);
  return blocks.map((lines) => `${lines.join("\r\n")}\r\n`).join("\r\n");
}

/** @param {Cue[]} cues */
export function toVtt(cues) {
  const blocks = cues.map((cue, index) => [
    index + 1,
    `${clockTime(cue.start_s, ".")} --> ${clockTime(cue.end_s, ".")}`,
    ...cue.lines.map(vttText),
  ]);
  return ["WEBVTT", ...blocks.map((lines) => lines.join("\n"))].join("\n\n") + "\n";
}

/** Columns that a text takes. */
export function columns(text) {
  if (PLAIN.test(text)) return text.length; // much the quickest, and nearly always so
  let n = 0;
  for (const { segment } of graphemes.segment(text)) n += WIDE.test(segment) ? 2 : 1;
  return n;
}

/** `HH:MM:SS,mmm`; hours grow past two digits where they must. */
export function clockTime(time_s, separator) {
  const total_ms = Math.round(time_s * 1000);
  const pad = (value, width) => String(value).padStart(width, "0");
  const [hours, minutes] = [Math.floor(total_ms / 3_600_000), Math.floor(total_ms / 60_000) % 60];
  const [seconds, ms] = [Math.floor(total_ms / 1000) % 60, total_ms % 1000];
  return `${pad(hours, 2)}:${pad(minutes, 2)}:${pad(seconds, 2)}${separator}${pad(ms, 3)}`;
}

/**
 * SubRip has no escapes. White space is folded, since an empty line would end the cue; an arrow would read as a time
 * line; and a word joiner keeps players from taking `<b` or `{\` for markup.
 */
function srtText(line) {
  return line.replaceAll("-->", "→").replace(/<(?=[a-z/])/gi, "<\u2060").replaceAll("{\\", "{\u2060\\");
}

function vttText(line) {
  return line.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

/** Words with white space folded, none empty, and a time for each. */
function timedWords(segment) {
  const words = segment.words.map((word) => ({ ...word, text: word.text.replace(/\s+/g, " ") }));
  const filled = words.filter((word) => word.text.trim() !== "");
  const hasTimes = filled.every((word) => word.start_s !== null && word.end_s !== null);
  return hasTimes ? filled : shareOut(filled, segment.start_s, segment.end_s);
}

/** Give each text a part of the stretch in proportion to its columns. */
function shareOut(words, start_s, end_s) {
  const weights = words.map((word) => columns(word.text));
  const total = weights.reduce((sum, weight) => sum + weight, 0);
  let before = 0;
  return words.map((word, index) => {
    const at = (weight) => start_s + ((end_s - start_s) * weight) / total;
    const timed = { text: word.text, start_s: at(before), end_s: at(before + weights[index]) };
    before += weights[index];
    return timed;
  });
}

/** A word wider than a line, as some models give for scripts without spaces, is cut between characters. */
function splitLongWord(word) {
  if (columns(word.text.trim()) <= MAX_COLUMNS) return [word];
  const parts = [""];
  for (const { segment } of graphemes.segment(word.text)) {
    if (columns((parts.at(-1) + segment).trim()) > MAX_COLUMNS) parts.push("");
    parts[parts.length - 1] += segment;
  }
  return shareOut(parts.map((text) => ({ text })), word.start_s, word.end_s);
}

/** Cut a segment's words into groups that each fit one cue. */
function groupWords(words) {
  const groups = [];
  let group = [];
  for (const word of words) {
    while (group.length > 0 && mustBreak(group, word)) {
      const n = breakPoint(group, word);
      groups.push(group.slice(0, n));
      group = group.slice(n);
    }
    group.push(word);
  }
  return group.length > 0 ? [...groups, group] : groups;
}

function mustBreak(group, word) {
  const isPause = word.start_s - group.at(-1).end_s >= PAUSE_S;
  return isPause || !fits([...group, word]);
}

function fits(group) {
  return wrap(group).length <= MAX_LINES && group.at(-1).end_s - group[0].start_s <= MAX_CUE_S;
}

/** How many words of a full group to show: up to the last sentence end, if the cue is then still a third full. */
function breakPoint(group, word) {
  if (word.start_s - group.at(-1).end_s >= PAUSE_S) return group.length;
  const n = group.findLastIndex((other) => SENTENCE_END.test(other.text)) + 1;
  return n > 0 && 3 * columns(joined(group.slice(0, n))) >= columns(joined(group)) ? n : group.length;
}

function cueOf(group) {
  return { start_s: group[0].start_s, end_s: group.at(-1).end_s, lines: balanced(group) };
}

function joined(words) {
  return words.map((word) => word.text).join("").trim();
}

/** Lines filled one after the other. */
function wrap(words) {
  const lines = [];
  let line = [];
  for (const word of words) {
    if (line.length > 0 && columns(joined([...line, word])) > MAX_COLUMNS) {
      lines.push(joined(line));
      line = [];
    }
    line.push(word);
  }
  return [...lines, joined(line)];
}

/** The same number of lines, of lengths as equal as can be: two even lines read quicker than a long and a short one. */
function balanced(words) {
  if (columns(joined(words)) <= MAX_COLUMNS) return [joined(words)];
  const halves = words.slice(1).map((_, index) => [joined(words.slice(0, index + 1)), joined(words.slice(index + 1))]);
  const widest = (lines) => Math.max(...lines.map(columns));
  return halves.reduce((best, lines) => (widest(lines) < widest(best) ? lines : best));
}

/** Words may overlap by a little, or last no time at all; cues may not. Short cues stay on where there is room. */
function separate(cues) {
  const starts_ms = [];
  for (const cue of cues) starts_ms.push(Math.max(Math.round(cue.start_s * 1000), (starts_ms.at(-1) ?? -1) + 1));
  return cues.map((cue, index) => {
    const readable_ms = starts_ms[index] + MIN_CUE_MS;
    const end_ms = Math.min(Math.max(Math.round(cue.end_s * 1000), readable_ms), starts_ms[index + 1] ?? Infinity);
    return { ...cue, start_s: starts_ms[index] / 1000, end_s: end_ms / 1000 };
  });
}
