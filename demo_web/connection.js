/**
 * The client's half of PROTOCOL.md: one session over as many WebSockets as it takes.
 * Knows the messages, keeps what the server has not acknowledged, resumes a lost session. Does not know where audio
 * comes from or what is shown; socket and clock are handed in, so that tests need neither.
 */

import { BYTES_PER_SAMPLE } from "./pcm.js";

export const SUBPROTOCOL = "senseway.v1.json";
export const PROTOCOL_VERSION = 1;
const KEY_SUBPROTOCOL = "senseway.key."; // a browser can't send a header with a WebSocket

const READY_TIMEOUT_MS = 12_000; // a little more than the server's own limit for a hello
const SILENT_LINK_MS = 30_000; // this long without any message while one is due: the link is dead
const FIRST_RETRY_MS = 250;
const LONGEST_RETRY_MS = 5_000;
const GIVE_UP_MS = 180_000;
const MAX_HELD_S = 300; // audio kept while it can't be sent: 29 MB at 48 kHz

const NORMAL_CLOSE = 1000;
const LEAVING_CLOSE = 4000; // the page drops a link that it believes dead
const HOPELESS = new Set(["taken_over"]); // fatal errors after which another try would do harm
const UPDATE_ERRORS = new Set(["unsupported_option", "bad_message"]); // how the server refuses an update

export const BROWSER_CLOCK = {
  now: () => performance.now(),
  setTimeout: (action, delay_ms) => setTimeout(action, delay_ms),
  clearTimeout: (timer) => clearTimeout(timer),
  random: () => Math.random(),
};

/**
 * The sub-protocols to offer: ours, and with it the key that the page's address names, `#key=…`, if it does.
 * @param {string} hash of the page's address
 */
export function offers(hash) {
  const key = new URLSearchParams(hash.slice(1)).get("key");
  return key ? [SUBPROTOCOL, KEY_SUBPROTOCOL + key] : [SUBPROTOCOL];
}

const openHere = (to) => new WebSocket(to, offers(location.hash));

/** Where the server of this page takes audio. */
export function streamUrl(page_url) {
  const url = new URL("v1/stream", page_url);
  url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
  url.hash = "";
  url.search = "";
  return url.href;
}

/** Audio and messages in the order they were given, kept until the server has answered for them. */
export class Outbox {
  #items = []; // audio {start_sample, bytes} and messages {message}
  #nSent = 0; // of the items, from the front
  end_sample = 0;
  acked_sample = 0;

  addAudio(bytes) {
    this.#items.push({ start_sample: this.end_sample, bytes });
    this.end_sample += bytes.length / BYTES_PER_SAMPLE;
  }

  addMessage(message) {
    this.#items.push({ message });
  }

  get heldSamples() {
    return this.end_sample - this.acked_sample;
  }

  get isWaiting() {
    return this.#items.length > 0;
  }

  /**
   * The next item to send, or undefined if there is none or if it would leave more than `n_window_samples`
   * unacknowledged. One frame may always be under way, however long it is.
   */
  takeNext(n_window_samples) {
    const item = this.#items[this.#nSent];
    if (item?.bytes && this.#isTooFar(item, n_window_samples)) return undefined;
    if (item) this.#nSent += 1;
    return item;
  }

  /** The server has every sample before `sample`. */
  acknowledge(sample) {
    this.acked_sample = Math.max(this.acked_sample, sample);
    this.#removeSent((item) => item.bytes && endOf(item) <= this.acked_sample);
  }

  /** The server answered a message that carries an id. */
  answer(id) {
    this.#removeSent((item) => item.message?.id === id);
  }

  /** The server refused a message and did not say which: it answers in order, so it is the oldest of its type. */
  answerOldest(type) {
    const oldest = this.#items.slice(0, this.#nSent).find((item) => item.message?.type === type);
    this.#removeSent((item) => item === oldest);
  }

  /** Send again from `taken_sample` on, and every message without an answer. */
  rewind(taken_sample) {
    this.acknowledge(taken_sample);
    this.#nSent = 0;
    const first = this.#items.findIndex((item) => item.bytes);
    if (first >= 0) this.#items[first] = cutBefore(this.#items[first], taken_sample);
  }

  /** Count from the first sample that is not acknowledged; returns how far the axis moved. */
  rebase() {
    const n_moved = this.acked_sample;
    this.rewind(n_moved);
    for (const item of this.#items) if (item.bytes) item.start_sample -= n_moved;
    this.end_sample -= n_moved;
    this.acked_sample = 0;
    return n_moved;
  }

  #isTooFar(item, n_window_samples) {
    return item.start_sample > this.acked_sample && endOf(item) - this.acked_sample > n_window_samples;
  }

  #removeSent(isDone) {
    const sent = this.#items.slice(0, this.#nSent).filter((item) => !isDone(item));
    this.#items.splice(0, this.#nSent, ...sent);
    this.#nSent = sent.length;
  }
}

function endOf(item) {
  return item.start_sample + item.bytes.length / BYTES_PER_SAMPLE;
}

function cutBefore(item, sample) {
  if (item.start_sample >= sample) return item;
  return { start_sample: sample, bytes: item.bytes.subarray((sample - item.start_sample) * BYTES_PER_SAMPLE) };
}

/**
 * @typedef {{phase: "connecting" | "live" | "reconnecting" | "closed",
 *   outcome?: "bye" | "refused" | "unreachable" | "lost" | "fatal" | "abandoned" | "overfull",
 *   error?: {code: string, message: string} | null}} Link
 * @typedef {{onLink: (link: Link) => void, onMessage: (message: object) => void, onRoom: () => void,
 *   onRestart: (n_moved_samples: number) => void}} Listener
 *   onMessage: every message but acks, each event once. onRoom: more audio may be sent. onRestart: the session could
 *   not be resumed; a new one begins with the first unacknowledged sample as its sample 0.
 */
export class Connection {
  #url;
  #hello;
  #listener;
  #openSocket;
  #clock;
  #outbox = new Outbox();
  #socket = null;
  #timer = null; // for a retry, a ready or a sign of life: only one of them is ever due
  #ready = null; // the newest, while its socket is open
  #session = null; // {session_id, last_event} once there was a ready
  #limits = { max_unacked_s: 0 };
  #fatal = null;
  #n_tries = 0;
  #lost_at_ms = null;
  #nextId = 1;
  #isFinishing = false;
  #isClosed = false;

  /**
   * @param {string} url
   * @param {object} hello the fields of a first `hello`, without its type
   * @param {Listener} listener
   */
  constructor(url, hello, listener, openSocket = openHere, clock = BROWSER_CLOCK) {
    this.#url = url;
    this.#hello = hello;
    this.#listener = listener;
    this.#openSocket = openSocket;
    this.#clock = clock;
  }

  get rate_hz() {
    return this.#hello.audio.sample_rate_hz;
  }

  get ackedSamples() {
    return this.#outbox.acked_sample;
  }

  get heldSamples() {
    return this.#outbox.heldSamples;
  }

  get endSample() {
    return this.#outbox.end_sample;
  }

  /** Samples that a source in no hurry may hand over now. */
  get roomSamples() {
    return this.#ready ? Math.max(0, this.#windowSamples - this.heldSamples) : 0;
  }

  start() {
    this.#tell({ phase: "connecting" });
    this.#open();
  }

  /** Queue s16le bytes of one channel; whole samples. Audio given before the session is ready waits. */
  sendAudio(bytes) {
    if (this.#isClosed || this.#isFinishing) return;
    this.#expectAnswer();
    this.#outbox.addAudio(bytes);
    if (this.heldSamples > MAX_HELD_S * this.rate_hz) this.#close({ outcome: "overfull" });
    this.#pump();
  }

  /** Change settings from the next utterance on. */
  update(settings) {
    if (this.#isClosed || this.#isFinishing) return;
    Object.assign(this.#hello, settings); // a session that must begin anew begins with these
    this.#send({ type: "update", id: `update-${this.#nextId++}`, ...settings });
  }

  /** Have everything decoded, then end the session. The link closes with outcome "bye". */
  finish() {
    if (this.#isFinishing || this.#isClosed) return;
    this.#isFinishing = true;
    this.#send({ type: "flush", id: `flush-${this.#nextId++}` });
    this.#send({ type: "bye" });
  }

  /** Leave at once. The bye spares the server waiting for a resume. */
  abandon() {
    if (this.#ready) this.#socket.send(JSON.stringify({ type: "bye" }));
    this.#close({ outcome: "abandoned" });
  }

  /** The network went away (or came back): don't wait to notice. */
  retryNow() {
    if (this.#isClosed || this.#session === null) return;
    this.#dropSocket();
    this.#n_tries = 0;
    this.#tell({ phase: "reconnecting", error: null });
    this.#open();
  }

  get #windowSamples() {
    return Math.floor(this.#limits.max_unacked_s * this.rate_hz);
  }

  #send(message) {
    this.#expectAnswer();
    this.#outbox.addMessage(message);
    this.#pump();
  }

  #open() {
    const socket = this.#openSocket(this.#url);
    socket.binaryType = "arraybuffer";
    socket.onopen = () => this.#greet();
    socket.onmessage = ({ data }) => this.#receive(JSON.parse(data));
    socket.onclose = () => this.#lost();
    this.#socket = socket;
    this.#fatal = null;
    this.#arm(READY_TIMEOUT_MS, () => this.#lost());
  }

  #greet() {
    const hello = this.#session ? { resume: this.#session } : this.#hello;
    this.#socket.send(JSON.stringify({ type: "hello", ...hello }));
  }

  #receive(message) {
    if (this.#isOld(message)) return;
    if (this.#ready) this.#watch();
    this.#handle(message);
    if (message.type !== "ack") this.#listener.onMessage(message);
    if (message.type === "bye") this.#close({ outcome: "bye" });
    this.#pump();
  }

  /** A resume may send again what crossed it on the wire. Errors that belong to no session have no number. */
  #isOld({ event }) {
    if (event === undefined || event === null || !this.#ready) return false;
    if (event <= this.#session.last_event) return true;
    this.#session.last_event = event;
    return false;
  }

  #handle(message) {
    switch (message.type) {
      case "ready":
        return this.#greeted(message);
      case "ack":
        this.#n_tries = 0;
        this.#outbox.acknowledge(message.samples);
        return this.#listener.onRoom();
      case "flushed":
      case "updated":
        return this.#outbox.answer(message.id);
      case "error":
        return this.#failed(message);
      default:
        return undefined;
    }
  }

  #greeted(ready) {
    if (ready.protocol !== PROTOCOL_VERSION) {
      const message = `this page speaks version ${PROTOCOL_VERSION}, the server ${ready.protocol}`;
      return this.#close({ outcome: "refused", error: { code: "protocol_version", message } });
    }
    this.#ready = ready;
    this.#limits = ready.limits;
    this.#session ??= { session_id: ready.session_id, last_event: 0 };
    this.#lost_at_ms = null;
    this.#outbox.rewind(ready.taken_samples);
    this.#watch();
    this.#tell({ phase: "live" });
    return this.#listener.onRoom();
  }

  #failed(error) {
    if (error.fatal) this.#fatal = error;
    else if (error.code === "unknown_session") this.#restart();
    else if (!this.#ready) this.#close({ outcome: "refused", error });
    else if (UPDATE_ERRORS.has(error.code)) this.#outbox.answerOldest("update");
  }

  /** What was lost with the session can't be had again; what was not acknowledged can. */
  #restart() {
    this.#session = null;
    this.#listener.onRestart(this.#outbox.rebase());
    this.#greet();
  }

  #pump() {
    if (!this.#ready) return;
    for (let item; (item = this.#outbox.takeNext(this.#windowSamples)); ) {
      this.#socket.send(item.bytes ?? JSON.stringify(item.message));
    }
  }

  /** While an answer is due, silence means that the link is dead: half-open connections never say so themselves. */
  #watch() {
    this.#arm(SILENT_LINK_MS, () => (this.#outbox.isWaiting ? this.#lost() : this.#watch()));
  }

  /** Nothing was due until now, so the silence so far meant nothing. */
  #expectAnswer() {
    if (this.#ready && !this.#outbox.isWaiting) this.#watch();
  }

  #lost() {
    this.#dropSocket();
    if (this.#session === null || HOPELESS.has(this.#fatal?.code)) {
      const outcome = this.#fatal ? "fatal" : "unreachable";
      return this.#close({ outcome, error: this.#fatal });
    }
    this.#lost_at_ms ??= this.#clock.now();
    if (this.#clock.now() - this.#lost_at_ms > GIVE_UP_MS) return this.#close({ outcome: "lost", error: this.#fatal });
    this.#tell({ phase: "reconnecting", error: this.#fatal });
    return this.#arm(this.#retryDelay_ms(), () => this.#open());
  }

  /** Doubles with each try; the random part keeps many pages from coming back in one wave. */
  #retryDelay_ms() {
    const longest_ms = Math.min(LONGEST_RETRY_MS, FIRST_RETRY_MS * 2 ** this.#n_tries);
    this.#n_tries += 1;
    return longest_ms * (0.5 + this.#clock.random() / 2);
  }

  #dropSocket() {
    if (this.#socket === null) return;
    for (const handler of ["onopen", "onmessage", "onclose"]) this.#socket[handler] = null;
    this.#socket.close(this.#isClosed ? NORMAL_CLOSE : LEAVING_CLOSE);
    this.#socket = null;
    this.#ready = null;
  }

  #close(ending) {
    if (this.#isClosed) return;
    this.#isClosed = true;
    this.#clock.clearTimeout(this.#timer);
    this.#dropSocket();
    this.#tell({ phase: "closed", error: null, ...ending });
  }

  #arm(delay_ms, action) {
    this.#clock.clearTimeout(this.#timer);
    this.#timer = this.#clock.setTimeout(action, delay_ms);
  }

  #tell(link) {
    this.#listener.onLink(link);
  }
}
