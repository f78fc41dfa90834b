/** Messages in, captions out. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { NO_CAPTIONS, isSpeaking, plainText, reduce, settled } from "../../demo_web/captions.js";

const word = (text, start_s = null, end_s = null, confidence = null) => ({ text, start_s, end_s, confidence });
const words = (text) => text.split(" ").map((part) => word(` ${part}`));

function segment(type, fields) {
  return { type, segment: 1, revision: 1, words: [], n_committed: 0, start_s: 0, end_s: 1, language: "en", ...fields };
}

const partial = (fields) => segment("partial", fields);
const final = (fields) => segment("final", { reason: "silence", n_committed: fields.words.length, ...fields });
const after = (...messages) => messages.reduce(reduce, NO_CAPTIONS);

test("a newer partial replaces an older one", () => {
  const captions = after(partial({ words: words("one") }), partial({ revision: 2, words: words("one two") }));
  assert.equal(captions.segments.length, 1);
  assert.equal(captions.segments[0].words.length, 2);
});

test("a partial older than what is known is dropped", () => {
  const known = after(partial({ revision: 5, words: words("one two") }));
  assert.equal(reduce(known, partial({ revision: 4, words: words("one") })), known);
});

test("a final ends its segment, whatever comes after it", () => {
  const known = after(final({ words: words("one two") }));
  assert.equal(known.segments[0].reason, "silence");
  assert.equal(reduce(known, partial({ revision: 9, words: words("three") })), known);
});

test("a final without words takes its partials back", () => {
  const captions = after(partial({ words: words("one") }), final({ revision: 2, words: [] }));
  assert.deepEqual(captions.segments, []);
});

test("segments stand in the order of their numbers, however they come", () => {
  const captions = after(...[2, 1, 3].map((id) => final({ segment: id, words: words(`word${id}`) })));
  assert.deepEqual(captions.segments.map(({ segment_id }) => segment_id), [1, 2, 3]);
});

test("segments that did not change stay the same objects", () => {
  const known = after(final({ words: words("one") }));
  const captions = reduce(known, partial({ segment: 2, words: words("two") }));
  assert.equal(captions.segments[0], known.segments[0]);
});

test("speech is open between started and ended", () => {
  const started = after({ type: "speech_started", start_s: 1, onset_s: 1.3 });
  assert.ok(isSpeaking(started));
  const ended = reduce(started, { type: "speech_ended", end_s: 2 });
  assert.ok(!isSpeaking(ended));
  assert.deepEqual(ended.speech, [{ start_s: 1, end_s: 2 }]);
});

test("a bye ends speech that was still open", () => {
  const captions = after({ type: "speech_started", start_s: 1, onset_s: 1.3 }, { type: "bye", audio_s: 3 });
  assert.deepEqual(captions.speech, [{ start_s: 1, end_s: 3 }]);
});

test("settled are finals, and of open segments the committed words only", () => {
  const captions = after(
    final({ words: words("one two") }),
    partial({ segment: 2, words: words("three four"), n_committed: 1 }),
    partial({ segment: 3, words: words("five") }),
  );
  assert.deepEqual(settled(captions).map(({ words }) => words.length), [2, 1]);
  assert.equal(plainText(captions), "one two\n\nthree");
});

test("text joins the words as they are, so that scripts without spaces stay without", () => {
  const captions = after(final({ words: [word("今日"), word("は"), word("晴れ。")] }));
  assert.equal(plainText(captions), "今日は晴れ。");
});

test("messages about other things change nothing", () => {
  for (const type of ["ready", "flushed", "updated", "warning", "error"]) {
    assert.equal(reduce(NO_CAPTIONS, { type }), NO_CAPTIONS);
  }
});
