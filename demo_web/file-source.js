/**
 * An audio file as a source of frames: decoded by the browser, sent as it plays or as fast as the server takes it.
 * Knows the browser's audio and the clock; does not know the protocol or the page.
 */

import { mixDown, rms, toS16le } from "./pcm.js";

export const FILE_RATE_HZ = 16_000; // decoding to it costs the models nothing, and sends a third of 48 kHz

const FRAME_SAMPLES = FILE_RATE_HZ / 20; // 50 ms
const PACE_MS = 50;

/**
 * Decode any format that the browser knows.
 * @param {File} file
 * @returns {Promise<Float32Array>} mono, at `FILE_RATE_HZ`; rejects with a DOMException named EncodingError
 */
export async function decodeFile(file) {
  const context = new OfflineAudioContext({ numberOfChannels: 1, length: 1, sampleRate: FILE_RATE_HZ });
  const buffer = await context.decodeAudioData(await file.arrayBuffer());
  return mixDown(Array.from({ length: buffer.numberOfChannels }, (_, channel) => buffer.getChannelData(channel)));
}

/** Wall time since the file began, or the player's own position where it is heard, so that text and sound agree. */
class Clock {
  #began_ms = performance.now();
  #player;

  constructor(player) {
    this.#player = player;
  }

  get elapsed_s() {
    if (this.#player === null) return (performance.now() - this.#began_ms) / 1000;
    return this.#player.ended ? Infinity : this.#player.currentTime;
  }
}

export class FileSource {
  rate_hz = FILE_RATE_HZ;
  waitsForServer = true;
  n_sent_samples = 0;
  #samples;
  #isPaced;
  #player;
  #listener;
  #timer = null;
  #isStopped = false;

  /**
   * @param {Float32Array} samples mono, at `FILE_RATE_HZ`
   * @param {{isPaced: boolean, audible: File | null}} choice at playing speed or not; the file to play aloud
   * @param {{onFrame: Function, onEnd: () => void, roomSamples: () => number}} listener room: samples that may go now
   */
  constructor(samples, { isPaced, audible }, listener) {
    this.#samples = samples;
    this.#isPaced = isPaced;
    this.#player = isPaced && audible ? new Audio(URL.createObjectURL(audible)) : null;
    this.#listener = listener;
  }

  get n_samples() {
    return this.#samples.length;
  }

  async start() {
    if (!this.#isPaced) return this.pump();
    if (this.#player) await this.#play();
    if (this.#isStopped) return undefined;
    const clock = new Clock(this.#player);
    this.#timer = setInterval(() => this.#sendUntil(clock.elapsed_s * FILE_RATE_HZ), PACE_MS);
    return undefined;
  }

  /** Send as much as the server has room for; call it whenever there may be more room. */
  pump() {
    if (!this.#isPaced) this.#sendUntil(this.n_sent_samples + this.#listener.roomSamples());
  }

  async stop() {
    this.#isStopped = true;
    clearInterval(this.#timer);
    if (!this.#player) return;
    this.#player.pause();
    URL.revokeObjectURL(this.#player.src);
  }

  /** A browser may decode a file that it will not play; the words matter more than the sound. */
  async #play() {
    try {
      await this.#player.play();
    } catch {
      URL.revokeObjectURL(this.#player.src);
      this.#player = null;
    }
  }

  /** Whole frames that end before `position`, and the last, shorter one when the file is over. */
  #sendUntil(position) {
    while (!this.#isStopped) {
      const end = Math.min(this.n_sent_samples + FRAME_SAMPLES, this.n_samples);
      if (end > position) return;
      const frame = this.#samples.subarray(this.n_sent_samples, end);
      this.n_sent_samples = end;
      if (frame.length > 0) this.#listener.onFrame({ bytes: toS16le(frame), rms: rms(frame) });
      if (end === this.n_samples) return this.#end();
    }
  }

  #end() {
    this.#isStopped = true;
    clearInterval(this.#timer);
    this.#listener.onEnd();
  }
}
