/**
 * Samples and levels: float audio as the browser has it, 16-bit audio as the wire wants it.
 * Knows arithmetic only; runs on the page, in the audio thread and under node.
 */

export const BYTES_PER_SAMPLE = 2; // s16le, one channel

const QUIETEST_DBFS = -54; // the level meter shows nothing up to here
const LOUDEST_DBFS = -8; // and is full from here on

/**
 * Samples of -1..1 as s16le; what is louder is clipped.
 * @param {Float32Array} samples
 * @returns {Uint8Array}
 */
export function toS16le(samples) {
  const bytes = new Uint8Array(samples.length * BYTES_PER_SAMPLE);
  const view = new DataView(bytes.buffer);
  for (let index = 0; index < samples.length; index += 1) {
    const scaled = Math.round(samples[index] * 32768);
    view.setInt16(index * BYTES_PER_SAMPLE, Math.max(-32768, Math.min(32767, scaled)), true);
  }
  return bytes;
}

/**
 * Root mean square of samples in -1..1.
 * @param {Float32Array} samples
 * @returns {number}
 */
export function rms(samples) {
  let sum = 0;
  for (const sample of samples) sum += sample * sample;
  return Math.sqrt(sum / Math.max(1, samples.length));
}

/**
 * A root mean square as a height of 0..1 for the eye: decibels, bent so that background noise stays low.
 * @param {number} value
 * @returns {number}
 */
export function levelOf(value) {
  const dbfs = 20 * Math.log10(Math.max(value, 1e-9));
  const part = (dbfs - QUIETEST_DBFS) / (LOUDEST_DBFS - QUIETEST_DBFS);
  return Math.min(1, Math.max(0, part)) ** 1.5;
}

/**
 * One channel: the mean of all.
 * @param {Float32Array[]} channels of equal length
 * @returns {Float32Array}
 */
export function mixDown(channels) {
  if (channels.length === 1) return channels[0];
  const mono = new Float32Array(channels[0].length);
  for (const channel of channels) {
    for (let index = 0; index < mono.length; index += 1) mono[index] += channel[index] / channels.length;
  }
  return mono;
}
