/** Sample positions, wall times and what follows for delays. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { Delays } from "../../demo_web/delays.js";
import { RecentMedian, SentTimeline, newlySettled, newlyShown } from "../../demo_web/latency.js";
import { levelOf, mixDown, rms, toS16le } from "../../demo_web/pcm.js";

const word = (text, end_s = null) => ({ text, start_s: end_s === null ? null : end_s - 0.2, end_s, confidence: null });

function timelineOf(...marks) {
  const timeline = new SentTimeline();
  for (const [end_sample, at_ms] of marks) timeline.record(end_sample, at_ms);
  return timeline;
}

test("a position was sent with the frame that holds it", () => {
  const timeline = timelineOf([800, 100], [1600, 150], [2400, 200]);
  assert.equal(timeline.sentAt(1), 100);
  assert.equal(timeline.sentAt(800), 100);
  assert.equal(timeline.sentAt(801), 150);
  assert.equal(timeline.sentAt(2400), 200);
});

test("a position that was not sent yet has no time", () => {
  assert.equal(timelineOf([800, 100]).sentAt(801), null);
});

test("a position too long ago has no time, rather than a wrong one", () => {
  const timeline = new SentTimeline();
  for (let index = 1; index <= 20_000; index += 1) timeline.record(index * 800, index * 50);
  assert.equal(timeline.sentAt(800), null);
  assert.equal(timeline.sentAt(19_000 * 800), 950_000);
  assert.equal(timeline.sentAt(18_000 * 800 + 1), 900_050);
});

test("after a session began anew, positions count from its own start", () => {
  const timeline = timelineOf([800, 100], [1600, 150]);
  timeline.rebase(800);
  assert.equal(timeline.sentAt(800), 150);
});

test("the median is that of the newest values", () => {
  const median = new RecentMedian(3);
  assert.equal(median.value, null);
  for (const value of [100, 1, 3]) median.add(value);
  assert.equal(median.value, 3);
  median.add(2); // 100 is forgotten
  assert.equal(median.value, 2);
});

test("new are words that were not there, and words that were others", () => {
  const previous = [word(" ice", 1), word(" cream", 2)];
  const current = [word(" I", 0.8), word(" scream", 2), word(" loud", 3)];
  assert.deepEqual(newlyShown(previous, current).map(({ text }) => text), [" I", " scream", " loud"]);
});

test("a word that moved a little, or along, is not new", () => {
  const previous = [word(" to", 1), word(" day", 2)];
  const current = [word(" so", 0.5), word(" to", 1.1), word(" day", 2.05)];
  assert.deepEqual(newlyShown(previous, current).map(({ text }) => text), [" so"]);
});

test("the same word said again is new", () => {
  assert.equal(newlyShown([word(" no", 1)], [word(" no", 1), word(" no", 2)]).length, 1);
});

test("settled are the words that the committed part grew by", () => {
  const current = { words: [word(" a"), word(" b"), word(" c")], n_committed: 2 };
  assert.deepEqual(newlySettled({ n_committed: 1 }, current).map(({ text }) => text), [" b"]);
  assert.equal(newlySettled(undefined, current).length, 2);
});

function delaysOf(...marks) {
  const delays = new Delays(1000);
  for (const [end_sample, at_ms] of marks) delays.timeline.record(end_sample, at_ms);
  return delays;
}

test("word delays run from sending a word's end to showing and settling it", () => {
  const delays = delaysOf([1000, 1000], [2000, 2000]);
  const shown = { words: [word(" a", 1)], n_committed: 0, reason: null };
  delays.segmentShown(undefined, shown, 1300);
  assert.equal(delays.shown_ms.value, 300);
  assert.equal(delays.settled_ms.value, null);
  delays.segmentShown(shown, { ...shown, n_committed: 1 }, 2100);
  assert.equal(delays.shown_ms.count, 1);
  assert.equal(delays.settled_ms.value, 1100);
});

test("words without times give no delay", () => {
  const delays = delaysOf([1000, 1000]);
  delays.segmentShown(undefined, { words: [word(" a")], n_committed: 1, reason: null }, 1300);
  assert.equal(delays.shown_ms.value, null);
});

test("a final is measured against the end of its own utterance", () => {
  const delays = delaysOf([1000, 1000], [5000, 5000]);
  delays.speechEnded(1.2, 1500); // an utterance without words: no final
  delays.speechEnded(5.2, 5600);
  const final = { words: [word(" a", 5)], n_committed: 1, start_s: 4, reason: "silence" };
  delays.segmentShown(undefined, final, 5700);
  assert.equal(delays.final_ms.value, 700);
  assert.equal(delays.decided_ms.value, 100);
});

test("a final that a flush asked for says nothing about pauses", () => {
  const delays = delaysOf([1000, 1000]);
  delays.speechEnded(1, 1100);
  delays.segmentShown(undefined, { words: [word(" a", 1)], n_committed: 1, start_s: 0, reason: "flush" }, 1200);
  assert.equal(delays.final_ms.value, null);
});

test("samples become little-endian 16-bit, clipped", () => {
  const bytes = toS16le(Float32Array.of(0, 0.5, -0.5, 1, -1, 2, -2));
  const view = new DataView(bytes.buffer);
  const values = Array.from({ length: 7 }, (_, index) => view.getInt16(index * 2, true));
  assert.deepEqual(values, [0, 16384, -16384, 32767, -32768, 32767, -32768]);
});

test("channels are mixed to their mean", () => {
  assert.deepEqual([...mixDown([Float32Array.of(1, 0), Float32Array.of(0, 1)])], [0.5, 0.5]);
});

test("levels lie in 0..1 and rise with loudness", () => {
  assert.equal(levelOf(rms(new Float32Array(8))), 0);
  assert.equal(levelOf(rms(new Float32Array(8).fill(1))), 1);
  assert.ok(levelOf(0.1) > levelOf(0.01));
});
