/** Segments in, subtitle files out. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { MAX_COLUMNS, MAX_LINES, clockTime, columns, cuesOf, toSrt, toVtt } from "../../demo_web/subtitles.js";

function segment(words, { start_s = words[0].start_s, end_s = words.at(-1).end_s } = {}) {
  return { words, start_s, end_s };
}

/** Words of `text` that begin every `step_s` and last for `word_s`. */
function timed(text, { from_s = 0, step_s = 0.4, word_s = 0.3 } = {}) {
  return text.split(" ").map((part, index) => {
    const start_s = from_s + index * step_s;
    return { text: ` ${part}`, start_s, end_s: start_s + word_s, confidence: null };
  });
}

const textOfCues = (cues) => cues.flatMap(({ lines }) => lines).join(" ");

/** A small generator with a seed (mulberry32), so that a failure can be repeated. */
function randomFrom(seed) {
  let state = seed;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

const SYLLABLES = ["a", "stream", "ing", "ly", "字", "幕", "é", "👩‍👩‍👧", "नि", "Ω", "<b>", "&", "-->", ".", "?"];

function randomSegments(seed) {
  const random = randomFrom(seed);
  const pick = (n) => Math.floor(random() * n);
  let now_s = random();
  return Array.from({ length: 1 + pick(4) }, () => {
    const words = Array.from({ length: 1 + pick(40) }, () => {
      const text = Array.from({ length: 1 + pick(random() < 0.05 ? 60 : 4) }, () => SYLLABLES[pick(SYLLABLES.length)]);
      const start_s = now_s;
      now_s += random() < 0.1 ? 0 : random() * (random() < 0.1 ? 9 : 0.6);
      return { text: (random() < 0.8 ? " " : "") + text.join(""), start_s, end_s: now_s, confidence: null };
    });
    const hasTimes = random() < 0.8;
    const bounds = { start_s: words[0].start_s, end_s: now_s };
    return segment(hasTimes ? words : words.map((word) => ({ ...word, start_s: null, end_s: null })), bounds);
  });
}

test("whatever the words: no more lines or columns than allowed, cues in order and apart, no text lost", () => {
  for (let seed = 0; seed < 150; seed += 1) {
    const segments = randomSegments(seed);
    const cues = cuesOf(segments);
    let end_s = 0;
    for (const cue of cues) {
      assert.ok(cue.lines.length >= 1 && cue.lines.length <= MAX_LINES, `seed ${seed}`);
      for (const line of cue.lines) assert.ok(line !== "" && columns(line) <= MAX_COLUMNS, `seed ${seed}: ${line}`);
      assert.ok(cue.start_s >= end_s && cue.end_s > cue.start_s, `seed ${seed}: ${cue.start_s}..${cue.end_s}`);
      end_s = cue.end_s;
    }
    const said = segments.flatMap(({ words }) => words.map(({ text }) => text)).join("");
    assert.equal(textOfCues(cues).replace(/\s/g, ""), said.replace(/\s/g, ""), `seed ${seed}`);
  }
});

test("a short segment is one cue with the words' own times", () => {
  const cues = cuesOf([segment(timed("hello over there", { from_s: 1.5 }))]);
  assert.deepEqual(cues, [{ start_s: 1.5, end_s: 2.6, lines: ["hello over there"] }]);
});

test("a cue that two lines can't hold is cut at the end of a sentence", () => {
  const text = "this is a sentence of a certain length. And this one, which comes next, is far too long for it all";
  const cues = cuesOf([segment(timed(text, { step_s: 0.2, word_s: 0.1 }))]);
  assert.equal(textOfCues(cues.slice(0, 1)), "this is a sentence of a certain length.");
});

test("two lines are of nearly equal length", () => {
  const [cue] = cuesOf([segment(timed("one line of forty-two columns takes what then", { step_s: 0.2 }))]);
  assert.deepEqual(cue.lines, ["one line of forty-two", "columns takes what then"]);
});

test("a pause begins a new cue", () => {
  const words = [...timed("before it"), ...timed("after it", { from_s: 3 })];
  assert.deepEqual(cuesOf([segment(words)]).map(({ lines }) => lines), [["before it"], ["after it"]]);
});

test("words without times share their segment by length", () => {
  const words = ["aaaa", "bbbb"].map((text) => ({ text, start_s: null, end_s: null, confidence: null }));
  const [cue] = cuesOf([segment(words, { start_s: 2, end_s: 4 })]);
  assert.deepEqual([cue.start_s, cue.end_s], [2, 4]);
});

test("wide characters count double", () => {
  assert.equal(columns("abc"), 3);
  assert.equal(columns("字幕"), 4);
  assert.equal(columns("👩‍👩‍👧"), 2);
  assert.equal(columns("e\u0301"), 1);
});

test("SubRip: numbers from 1, commas in times, CRLF, an empty line between cues", () => {
  const cues = cuesOf([segment(timed("one")), segment(timed("two", { from_s: 5 }))]);
  const expected = "1\r\n00:00:00,000 --> 00:00:00,800\r\none\r\n\r\n2\r\n00:00:05,000 --> 00:00:05,800\r\ntwo\r\n";
  assert.equal(toSrt(cues), expected);
});

test("WebVTT: header, full stops in times, an empty line between cues", () => {
  const cues = cuesOf([segment(timed("one")), segment(timed("two", { from_s: 5 }))]);
  const expected = "WEBVTT\n\n1\n00:00:00.000 --> 00:00:00.800\none\n\n2\n00:00:05.000 --> 00:00:05.800\ntwo\n";
  assert.equal(toVtt(cues), expected);
});

test("text can't be taken for markup or for a time line", () => {
  const cue = { start_s: 0, end_s: 1, lines: ["a < b && <b>c</b> --> d {\\an8}"] };
  assert.match(toVtt([cue]), /^a &lt; b &amp;&amp; &lt;b&gt;c&lt;\/b&gt; --&gt; d \{\\an8\}$/m);
  const srt = toSrt([cue]).split("\r\n")[2];
  assert.equal(srt, "a < b && <\u2060b>c<\u2060/b> → d {\u2060\\an8}");
});

test("line ends inside a word don't end its cue", () => {
  const cues = cuesOf([segment([{ text: " one\n\ntwo", start_s: 0, end_s: 1, confidence: null }])]);
  assert.deepEqual(cues[0].lines, ["one two"]);
});

test("no words make an empty file of the right kind", () => {
  assert.equal(toSrt([]), "");
  assert.equal(toVtt([]), "WEBVTT\n");
});

test("times go past an hour, and past a hundred", () => {
  assert.equal(clockTime(3661.0015, ","), "01:01:01,002");
  assert.equal(clockTime(360_000, "."), "100:00:00.000");
});
