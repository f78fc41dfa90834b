/**
 * The audio thread: gathers the microphone's 128-sample quanta into frames of s16le and posts them to the page.
 * Knows neither the page nor the server. The first frame begins with the first quantum; none is left out after it.
 */

import { rms, toS16le } from "./pcm.js";

const FRAME_MS = 50; // long enough to keep messages few, short enough to add little delay

class Capture extends AudioWorkletProcessor {
  #frame = new Float32Array(Math.round((sampleRate * FRAME_MS) / 1000));
  #nFilled = 0;
  #isStopped = false;

  constructor() {
    super();
    this.port.onmessage = () => this.#stop();
  }

  /** Called for every quantum. No channels means that the source gives no sound: silence counts as time too. */
  process([input]) {
    if (this.#isStopped) return false;
    this.#append(input[0] ?? new Float32Array(128));
    return true;
  }

  #append(samples) {
    let nTaken = 0;
    while (nTaken < samples.length) {
      const part = samples.subarray(nTaken, nTaken + this.#frame.length - this.#nFilled);
      this.#frame.set(part, this.#nFilled);
      this.#nFilled += part.length;
      nTaken += part.length;
      if (this.#nFilled === this.#frame.length) this.#post();
    }
  }

  #post() {
    const samples = this.#frame.subarray(0, this.#nFilled);
    const bytes = toS16le(samples);
    this.port.postMessage({ type: "frame", bytes, rms: rms(samples) }, [bytes.buffer]);
    this.#nFilled = 0;
  }

  /** The part of a frame gathered so far goes out too: it may hold the end of the last word. */
  #stop() {
    if (this.#nFilled > 0) this.#post();
    this.#isStopped = true;
    this.port.postMessage({ type: "stopped" });
  }
}

registerProcessor("capture", Capture);
