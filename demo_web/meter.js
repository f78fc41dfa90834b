/**
 * The level meter: the last seconds of sound as bars, coloured where the server heard speech.
 * Knows a canvas and style variables. The verdict comes later than the sound and colours bars after the fact.
 */

import { levelOf } from "./pcm.js";

const BAR_PX = 3;
const GAP_PX = 2;
const KEPT_BARS = 600;
const MIN_HEIGHT = 0.04; // silence is a dotted line, not nothing

export class Meter {
  #canvas;
  #bars = []; // {start_s, end_s, level}
  #speech = [];
  #isDue = false;
  #still = matchMedia("(prefers-reduced-motion: reduce)");

  /** @param {HTMLCanvasElement} canvas styled by `--meter-idle` and `--meter-speech` */
  constructor(canvas) {
    this.#canvas = canvas;
    new ResizeObserver(() => this.redraw()).observe(canvas);
  }

  reset() {
    this.#bars = [];
    this.#speech = [];
    this.redraw();
  }

  /** A frame of sound from `start_s` to `end_s` of the session. */
  add(start_s, end_s, rms) {
    this.#bars.push({ start_s, end_s, level: levelOf(rms) });
    if (this.#bars.length > KEPT_BARS) this.#bars.shift();
    this.redraw();
  }

  /** @param {import("./captions.js").Speech[]} speech where someone spoke */
  setSpeech(speech) {
    this.#speech = speech;
    this.redraw();
  }

  /** Draw with the next frame of the screen, once however often it is asked for. */
  redraw() {
    if (this.#isDue) return;
    this.#isDue = true;
    requestAnimationFrame(() => this.#draw());
  }

  #draw() {
    this.#isDue = false;
    const { clientWidth: width, clientHeight: height } = this.#canvas;
    const scale = devicePixelRatio;
    this.#canvas.width = Math.round(width * scale);
    this.#canvas.height = Math.round(height * scale);
    const context = this.#canvas.getContext("2d");
    context.scale(scale, scale);
    if (this.#still.matches) this.#drawStill(context, width, height);
    else this.#drawBars(context, width, height);
  }

  /** The newest bar stands at the right; what there is no sound for yet is a dotted line. */
  #drawBars(context, width, height) {
    const nShown = Math.floor((width + GAP_PX) / (BAR_PX + GAP_PX));
    const shown = this.#bars.slice(-nShown);
    const colours = this.#colours();
    for (let index = 0; index < nShown; index += 1) {
      const bar = shown[index - (nShown - shown.length)];
      const bar_px = Math.max(BAR_PX, height * Math.max(MIN_HEIGHT, bar?.level ?? 0));
      context.fillStyle = bar && this.#isSpeech(bar) ? colours.speech : colours.idle;
      context.beginPath();
      context.roundRect(index * (BAR_PX + GAP_PX), (height - bar_px) / 2, BAR_PX, bar_px, BAR_PX / 2);
      context.fill();
    }
  }

  /** Nothing moves along: one bar for the level of now. */
  #drawStill(context, width, height) {
    const bar = this.#bars.at(-1);
    const colours = this.#colours();
    const thickness_px = Math.min(12, height);
    const draw = (colour, part) => {
      const length_px = Math.max(thickness_px, width * part);
      context.fillStyle = colour;
      context.beginPath();
      context.roundRect(0, (height - thickness_px) / 2, length_px, thickness_px, thickness_px / 2);
      context.fill();
    };
    draw(colours.track, 1);
    if (bar) draw(this.#isSpeech(bar) ? colours.speech : colours.idle, bar.level);
  }

  #colours() {
    const style = getComputedStyle(this.#canvas);
    const colour = (name) => style.getPropertyValue(name);
    return { idle: colour("--meter-idle"), speech: colour("--meter-speech"), track: colour("--meter-track") };
  }

  /** Newest stretches first, since it is nearly always one of those. */
  #isSpeech(bar) {
    const stretch = this.#speech.findLast((speech) => speech.start_s < bar.end_s);
    return stretch !== undefined && (stretch.end_s ?? Infinity) > bar.start_s;
  }
}
