/**
 * The microphone as a source of frames: permission, audio context, worklet.
 * Knows the browser's audio; does not know the protocol or the page.
 */

const HIGHEST_RATE_HZ = 48_000; // the most the protocol takes

/**
 * Ask for the microphone and make ready to capture; `start` begins.
 * @param {{echoCancellation: boolean, noiseSuppression: boolean, autoGainControl: boolean}} processing by the browser
 * @param {{onFrame: (frame: {bytes: Uint8Array, rms: number}) => void, onLost: () => void}} listener
 * @returns {Promise<Microphone>} rejects with a DOMException when the browser or the user says no
 */
export async function openMicrophone(processing, listener) {
  if (!navigator.mediaDevices) throw new DOMException("microphones need HTTPS or localhost", "InsecureContextError");
  const stream = await navigator.mediaDevices.getUserMedia({ audio: processing });
  try {
    return await prepare(stream, listener);
  } catch (error) {
    for (const track of stream.getTracks()) track.stop();
    throw error;
  }
}

async function prepare(stream, listener) {
  const context = await openContext();
  await context.audioWorklet.addModule(new URL("capture-worklet.js", import.meta.url));
  const options = { numberOfOutputs: 0, channelCount: 1, channelCountMode: "explicit" };
  const node = new AudioWorkletNode(context, "capture", options);
  await context.resume();
  return new Microphone(stream, context, node, listener);
}

/** A context at the device's own rate, so that nothing is resampled here, unless that rate is more than can be sent. */
async function openContext() {
  const context = new AudioContext({ latencyHint: "interactive" });
  if (context.sampleRate <= HIGHEST_RATE_HZ) return context;
  await context.close();
  return new AudioContext({ latencyHint: "interactive", sampleRate: HIGHEST_RATE_HZ });
}

class Microphone {
  waitsForServer = false; // what is said while the connection opens is not lost
  #stream;
  #context;
  #node;
  #stopped;

  constructor(stream, context, node, listener) {
    this.#stream = stream;
    this.#context = context;
    this.#node = node;
    this.rate_hz = context.sampleRate;
    this.#stopped = new Promise((resolve) => {
      node.port.onmessage = ({ data }) => (data.type === "frame" ? listener.onFrame(data) : resolve());
    });
    for (const track of stream.getTracks()) track.addEventListener("ended", () => listener.onLost());
    // A phone call or a sleeping tab may suspend the context; take it up again as soon as the browser lets us.
    context.addEventListener("statechange", () => {
      if (context.state === "suspended" || context.state === "interrupted") context.resume();
    });
  }

  start() {
    this.#context.createMediaStreamSource(this.#stream).connect(this.#node);
  }

  /** Hand over the last, shorter frame, then let go of the device. */
  async stop() {
    if (this.#context.state === "closed") return;
    if (this.#context.state === "running") {
      this.#node.port.postMessage("stop");
      await this.#stopped;
    }
    for (const track of this.#stream.getTracks()) track.stop();
    await this.#context.close();
  }
}
