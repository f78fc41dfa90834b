/** The protocol client against a server that behaves as PROTOCOL.md says, over links that break. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { Connection, Outbox, offers, streamUrl } from "../../demo_web/connection.js";

const RATE_HZ = 1000;
const AUDIO = { encoding: "s16le", sample_rate_hz: RATE_HZ, channels: 1 };
const FRAME_SAMPLES = 50;
const EVENT_SAMPLES = 100; // the fake server recites a word for so many samples

/** Timers that run when the test says so. */
class Clock {
  now_ms = 0;
  #timers = [];

  now = () => this.now_ms;
  random = () => 1;
  clearTimeout = (timer) => (this.#timers = this.#timers.filter((other) => other !== timer));

  setTimeout = (action, delay_ms) => {
    const timer = { action, at_ms: this.now_ms + delay_ms };
    this.#timers.push(timer);
    return timer;
  };

  advance(ms) {
    const until_ms = this.now_ms + ms;
    for (let next; (next = this.#next(until_ms)); ) {
      this.clearTimeout(next);
      this.now_ms = next.at_ms;
      next.action();
    }
    this.now_ms = until_ms;
  }

  #next(until_ms) {
    const due = this.#timers.filter((timer) => timer.at_ms <= until_ms);
    return due.sort((one, other) => one.at_ms - other.at_ms)[0];
  }
}

/** One link. What either side sends lies in a queue until it is delivered, so that a cut can lose it. */
class Socket {
  sent = []; // to the server
  coming = []; // to the client
  closeCode = null;
  #isOpen = false;

  constructor(server) {
    this.server = server;
  }

  send(data) {
    this.sent.push(data);
  }

  close(code) {
    this.closeCode = code;
  }

  open() {
    if (!this.#isOpen) this.onopen?.();
    this.#isOpen = true;
  }

  /** Deliver up to `n` messages each way. */
  deliver(n = Infinity) {
    for (let index = 0; index < n && this.sent.length > 0; index += 1) this.server.take(this, this.sent.shift());
    for (let index = 0; index < n && this.coming.length > 0; index += 1) this.#receive(this.coming.shift());
  }

  cut() {
    this.onclose?.({ code: 1006 });
  }

  #receive(message) {
    this.onmessage?.({ data: JSON.stringify(message) });
  }
}

class Server {
  session = null;
  hellos = [];
  updates = [];
  nSessions = 0;
  limits = { max_frame_bytes: 1 << 20, max_unacked_s: 1, resume_window_s: 60 };
  acks = true;

  take(socket, data) {
    if (typeof data !== "string") return this.#audio(socket, data);
    const message = JSON.parse(data);
    return this[message.type](socket, message);
  }

  hello(socket, hello) {
    this.hellos.push(hello);
    if (hello.resume) return this.#resume(socket, hello.resume);
    this.session = { id: `session-${++this.nSessions}`, samples: [], events: [], answered: new Set() };
    return this.#ready(socket, false);
  }

  flush(socket, { id }) {
    if (this.session.answered.has(id)) return;
    this.session.answered.add(id);
    this.#event(socket, { type: "flushed", id, at_s: this.session.samples.length / RATE_HZ });
  }

  update(socket, { id, language }) {
    this.updates.push(language);
    this.#event(socket, { type: "updated", id, at_s: 0 });
  }

  bye(socket) {
    this.#event(socket, { type: "bye", reason: "bye", audio_s: this.session.samples.length / RATE_HZ });
  }

  #resume(socket, { session_id, last_event }) {
    if (this.session?.id !== session_id) {
      return socket.coming.push({ type: "error", event: 1, code: "unknown_session", message: "gone", fatal: false });
    }
    this.#ready(socket, true);
    return socket.coming.push(...this.session.events.filter(({ event }) => event > last_event));
  }

  #ready(socket, resumed) {
    const { id, samples } = this.session;
    const about = { protocol: 1, session_id: id, resumed, taken_samples: samples.length, limits: this.limits };
    socket.coming.push({ type: "ready", ...about, models: [], engine: {} });
  }

  #audio(socket, bytes) {
    const { samples } = this.session;
    for (let index = 0; index < bytes.length; index += 2) {
      samples.push(bytes[index] | (bytes[index + 1] << 8));
      if (samples.length % EVENT_SAMPLES === 0) this.#event(socket, { type: "partial", revision: samples.length });
    }
    if (this.acks) socket.coming.push({ type: "ack", samples: samples.length });
  }

  #event(socket, message) {
    const event = { event: this.session.events.length + 1, ...message };
    this.session.events.push(event);
    socket.coming.push(event);
  }
}

/** A connection with all it stands between. */
function setUp() {
  const clock = new Clock();
  const server = new Server();
  const sockets = [];
  const heard = { links: [], messages: [], rooms: 0, restarts: [] };
  const listener = {
    onLink: (link) => heard.links.push(link),
    onMessage: (message) => heard.messages.push(message),
    onRoom: () => (heard.rooms += 1),
    onRestart: (n_moved_samples) => heard.restarts.push(n_moved_samples),
  };
  const openSocket = () => {
    sockets.push(new Socket(server));
    return sockets.at(-1);
  };
  const connection = new Connection("ws://test/v1/stream", { audio: AUDIO }, listener, openSocket, clock);
  const newest = () => sockets.at(-1);
  const phase = () => heard.links.at(-1).phase;
  let n_made = 0;
  /** Sample number n has the value n, so that the server can tell what is missing. */
  const speak = (n_samples = FRAME_SAMPLES) => {
    const bytes = new Uint8Array(n_samples * 2);
    for (let index = 0; index < n_samples; index += 1) {
      bytes[index * 2] = (n_made + index) & 255;
      bytes[index * 2 + 1] = ((n_made + index) >> 8) & 255;
    }
    n_made += n_samples;
    connection.sendAudio(bytes);
  };
  const begin = () => {
    connection.start();
    newest().open();
    newest().deliver();
  };
  return { clock, server, sockets, heard, connection, newest, phase, speak, begin };
}

const counting = (n) => Array.from({ length: n }, (_, index) => index);

test("audio given before the session is ready waits and then goes first", () => {
  const { server, newest, connection, speak } = setUp();
  connection.start();
  speak();
  newest().open();
  newest().deliver();
  newest().deliver();
  assert.deepEqual(server.session.samples, counting(FRAME_SAMPLES));
});

test("no more audio is under way than the server allows", () => {
  const { server, newest, begin, speak } = setUp();
  server.acks = false;
  begin();
  for (let index = 0; index < 30; index += 1) speak();
  newest().deliver();
  assert.equal(server.session.samples.length, 1000);
});

test("room opens with acknowledgements", () => {
  const { server, heard, newest, connection, begin, speak } = setUp();
  begin();
  assert.equal(connection.roomSamples, 1000);
  speak(600);
  assert.equal(connection.roomSamples, 400);
  const rooms = heard.rooms;
  newest().deliver();
  assert.equal(connection.roomSamples, 1000);
  assert.equal(heard.rooms, rooms + 1);
  assert.equal(server.session.samples.length, 600);
});

test("whatever the cuts: every sample arrives once and in order, every event is told once", () => {
  for (let seed = 1; seed <= 200; seed += 1) {
    let state = seed;
    const pick = (n) => (state = (state * 48_271) % 2_147_483_647) % n;
    const { clock, server, heard, connection, newest, phase, speak, begin } = setUp();
    begin();
    for (let step = 0; step < 60; step += 1) {
      speak(1 + pick(120));
      newest().deliver(pick(4));
      if (pick(6) === 0) newest().cut();
      if (phase() === "reconnecting" && pick(2) === 0) clock.advance(10_000);
      newest().open();
    }
    connection.finish();
    for (let step = 0; step < 20 && phase() !== "closed"; step += 1) {
      clock.advance(6_000);
      newest().open();
      newest().deliver();
    }
    assert.equal(heard.links.at(-1).outcome, "bye", `seed ${seed}`);
    assert.deepEqual(server.session.samples, counting(connection.endSample), `seed ${seed}`);
    const events = heard.messages.filter(({ event }) => event !== undefined).map(({ event }) => event);
    assert.deepEqual(events, counting(server.session.events.length + 1).slice(1), `seed ${seed}`);
    assert.deepEqual(heard.restarts, [], `seed ${seed}`);
  }
});

test("a frame taken in part is sent again from where it was cut", () => {
  const { clock, server, newest, begin, speak } = setUp();
  begin();
  speak();
  server.session.samples.push(...counting(20)); // taken, but the acknowledgement is lost
  newest().cut();
  clock.advance(1000);
  newest().open();
  newest().deliver();
  newest().deliver();
  assert.deepEqual(server.session.samples, counting(FRAME_SAMPLES));
});

test("a resume says nothing but the session and the last event", () => {
  const { clock, server, newest, begin, speak } = setUp();
  begin();
  speak(EVENT_SAMPLES);
  newest().deliver();
  newest().cut();
  clock.advance(1000);
  newest().open();
  newest().deliver();
  const resume = { session_id: "session-1", last_event: 1 };
  assert.deepEqual(server.hellos.at(-1), { type: "hello", resume });
});

test("a session that is gone begins anew with the audio that was not acknowledged", () => {
  const { clock, server, heard, connection, newest, phase, begin, speak } = setUp();
  begin();
  speak();
  newest().deliver();
  newest().cut();
  speak();
  server.session = null;
  clock.advance(1000);
  newest().open();
  newest().deliver(); // unknown_session
  newest().deliver(); // hello, ready
  newest().deliver(); // audio
  assert.deepEqual(heard.restarts, [FRAME_SAMPLES]);
  assert.equal(phase(), "live");
  assert.deepEqual(server.session.samples, counting(2 * FRAME_SAMPLES).slice(FRAME_SAMPLES));
  assert.equal(connection.endSample, FRAME_SAMPLES);
  speak();
  newest().deliver();
  assert.equal(server.session.samples.length, 2 * FRAME_SAMPLES);
});

test("settings that changed hold for a session that must begin anew", () => {
  const { clock, server, connection, newest, begin } = setUp();
  begin();
  connection.update({ language: "de" });
  newest().deliver();
  newest().cut();
  server.session = null;
  clock.advance(1000);
  newest().open();
  newest().deliver();
  newest().deliver();
  assert.equal(server.hellos.at(-1).language, "de");
});

test("an update that the link lost is sent again; one that was answered or refused is not", () => {
  const { clock, server, connection, newest, begin } = setUp();
  begin();
  connection.update({ language: "de" });
  newest().deliver();
  connection.update({ language: "xx" });
  newest().sent.pop();
  newest().coming.push({ type: "error", event: 2, code: "unsupported_option", message: "no xx", fatal: false });
  newest().deliver();
  connection.update({ language: "fr" });
  newest().sent.pop();
  newest().cut();
  clock.advance(1000);
  newest().open();
  newest().deliver();
  newest().deliver();
  assert.deepEqual(server.updates, ["de", "fr"]);
});

test("retries come ever more slowly, and end", () => {
  const { clock, sockets, heard, newest, begin } = setUp();
  begin();
  newest().cut();
  const waits_ms = [];
  while (heard.links.at(-1).phase !== "closed") {
    const [n_sockets, since_ms] = [sockets.length, clock.now_ms];
    while (sockets.length === n_sockets) clock.advance(10);
    waits_ms.push(clock.now_ms - since_ms);
    newest().cut();
  }
  assert.deepEqual(waits_ms.slice(0, 6), [250, 500, 1000, 2000, 4000, 5000]);
  assert.equal(heard.links.at(-1).outcome, "lost");
});

test("a server that can't be reached at the start is said at once", () => {
  const { heard, connection, newest } = setUp();
  connection.start();
  newest().cut();
  assert.equal(heard.links.at(-1).outcome, "unreachable");
});

test("a refused hello closes with the server's reason", () => {
  const { heard, connection, newest } = setUp();
  connection.start();
  newest().open();
  const error = { type: "error", event: 1, code: "unknown_model", message: "there is only x", fatal: false };
  newest().coming.push(error);
  newest().deliver();
  assert.deepEqual(heard.links.at(-1), { phase: "closed", outcome: "refused", error });
});

test("a page that was taken over stays away", () => {
  const { clock, sockets, heard, newest, begin } = setUp();
  begin();
  newest().coming.push({ type: "error", event: 1, code: "taken_over", message: "elsewhere", fatal: true });
  newest().deliver();
  newest().cut();
  clock.advance(60_000);
  assert.equal(heard.links.at(-1).outcome, "fatal");
  assert.equal(sockets.length, 1);
});

test("a link that is silent while an answer is due is given up for a new one", () => {
  const { clock, sockets, phase, server, begin, speak } = setUp();
  begin();
  clock.advance(119_000); // nothing is due: silence is fine
  server.acks = false;
  speak();
  clock.advance(29_000);
  assert.equal(phase(), "live");
  clock.advance(2_000);
  assert.equal(sockets.length, 2);
});

test("a server of another protocol version is refused", () => {
  const { heard, connection, newest } = setUp();
  connection.start();
  newest().open();
  newest().coming.push({ type: "ready", protocol: 2 });
  newest().deliver();
  assert.equal(heard.links.at(-1).error.code, "protocol_version");
});

test("leaving at once says bye, so that nothing waits for a resume", () => {
  const { newest, connection, begin } = setUp();
  begin();
  connection.abandon();
  assert.deepEqual(JSON.parse(newest().sent.at(-1)), { type: "bye" });
  assert.equal(newest().closeCode, 1000);
});

test("audio that can't be sent is not kept for ever", () => {
  const { heard, connection, newest, begin } = setUp();
  begin();
  newest().cut();
  for (let index = 0; index < 301; index += 1) connection.sendAudio(new Uint8Array(2 * RATE_HZ));
  assert.equal(heard.links.at(-1).outcome, "overfull");
});

test("a frame longer than all that may be under way still goes when nothing else is", () => {
  const outbox = new Outbox();
  outbox.addAudio(new Uint8Array(4000));
  outbox.addAudio(new Uint8Array(2));
  assert.equal(outbox.takeNext(1000).bytes.length, 4000);
  assert.equal(outbox.takeNext(1000), undefined);
  outbox.acknowledge(2000);
  assert.equal(outbox.takeNext(1000).bytes.length, 2);
});

test("the stream lies beside the page, under the matching scheme", () => {
  assert.equal(streamUrl("http://localhost:8300/"), "ws://localhost:8300/v1/stream");
  assert.equal(streamUrl("https://example.org/captions/?a=1#b"), "wss://example.org/captions/v1/stream");
});

test("a key in the page's address is offered beside the sub-protocol", () => {
  assert.deepEqual(offers(""), ["senseway.v1.json"]);
  assert.deepEqual(offers("#about"), ["senseway.v1.json"]);
  assert.deepEqual(offers("#key=sk-1_2.3"), ["senseway.v1.json", "senseway.key.sk-1_2.3"]);
});
