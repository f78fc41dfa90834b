/**
 * The page: puts microphone or file, connection, captions and settings together.
 * Knows everyone; decides nothing that one of them could. One run is one source of audio over one connection; it fills
 * one transcript, or more where a lost session had to begin anew.
 */

import { Follower, TranscriptView, announceFinal, shortTime } from "./captions-view.js";
import { NO_CAPTIONS, isFinal, isSpeaking, reduce } from "./captions.js";
import { Connection, streamUrl } from "./connection.js";
import { Delays } from "./delays.js";
import { explainCode, explainEnding, explainFile, explainMicrophone } from "./explain.js";
import { FileSource, decodeFile } from "./file-source.js";
import { Meter } from "./meter.js";
import { openMicrophone } from "./microphone.js";
import { Notices } from "./notices.js";
import { Settings } from "./settings.js";

const SILENT_INPUT_S = 4; // this long with nothing but zeros: the microphone is muted somewhere

const LINK_WORDS = {
  idle: "Ready",
  opening: "Opening…",
  connecting: "Connecting…",
  live: "Live",
  finishing: "Finishing…",
  reconnecting: "Connection lost. Reconnecting…",
};

const VERDICT_WORDS = { off: "Off", waiting: "Waiting", speech: "Speech", silence: "Silence" };
const RECORD_WORDS = { idle: "Start", opening: "Cancel", running: "Stop", finishing: "Stop now" };

const THEMES = ["system", "light", "dark"];

const byId = (id) => document.getElementById(id);

/** Calls back once the browser has painted what the page holds now; never, while nobody can see it. */
function afterPaint(action) {
  if (document.hidden) return;
  requestAnimationFrame(() => {
    const channel = new MessageChannel();
    channel.port1.onmessage = () => action(performance.now());
    channel.port2.postMessage(null);
  });
}

/** One source of audio over one connection, and what became of it so far. */
class Run {
  captions = NO_CAPTIONS;
  view = null;
  source = null;
  connection = null;
  delays = null;
  link = "connecting";
  isFinishing = false;
  silent_s = 0; // of nothing but zeros, until now
  began_ms = performance.now();

  /** @param {string} name of the source @param {boolean} isPaced whether audio comes at the speed it is heard */
  constructor(name, isPaced) {
    this.name = name;
    this.isPaced = isPaced;
  }

  seconds(n_samples) {
    return n_samples / this.source.rate_hz;
  }
}

class Page {
  #phase = "idle"; // idle, opening, running, finishing
  #run = null; // the one under way
  #newest = null; // the one whose figures are shown
  #opening = 0; // counts attempts, so that one given up finds out
  #notices = new Notices(byId("notices"));
  #meter = new Meter(byId("meter"));
  #follower = new Follower(byId("captions"), byId("jump"));
  #settings = new Settings(byId("settings"), (fields) => this.#run?.connection.update(fields));

  constructor() {
    byId("record").addEventListener("click", () => this.#toggle());
    document.addEventListener("keydown", (event) => this.#key(event));
    addEventListener("online", () => this.#run?.connection.retryNow());
    addEventListener("offline", () => this.#run?.connection.retryNow());
    addEventListener("pagehide", () => this.#run?.connection.abandon());
    this.#prepareFiles();
    this.#prepareTheme();
    this.#setPhase("idle");
    this.#fetchModels();
  }

  // ---------------------------------------------------------------- begin and end

  async #toggle() {
    if (this.#phase === "idle") return this.#startMicrophone();
    if (this.#phase === "running") return this.#finish(this.#run);
    if (this.#phase === "finishing") return this.#run.connection.abandon();
    this.#opening += 1; // what is being opened finds out when it is open
    return this.#setPhase("idle");
  }

  async #startMicrophone() {
    const isWanted = this.#beginOpening();
    const run = new Run("Microphone", true);
    const listener = { onFrame: (frame) => this.#frame(run, frame), onLost: () => this.#microphoneLost(run) };
    try {
      const microphone = await openMicrophone(this.#settings.processing, listener);
      if (isWanted()) this.#begin(run, microphone);
      else await microphone.stop();
    } catch (error) {
      if (isWanted()) this.#openingFailed(explainMicrophone(error));
    }
  }

  async #startFile(file) {
    if (this.#phase !== "idle") return this.#notices.show("file", "note", "Stop first, then open the file.");
    const isWanted = this.#beginOpening();
    const run = new Run(file.name, byId("speed").value === "paced");
    const listener = {
      onFrame: (frame) => this.#frame(run, frame),
      onEnd: () => this.#finish(run),
      roomSamples: () => run.connection.roomSamples,
    };
    try {
      const samples = await decodeFile(file);
      const audible = byId("aloud").checked ? file : null;
      if (isWanted()) this.#begin(run, new FileSource(samples, { isPaced: run.isPaced, audible }, listener));
    } catch (error) {
      if (isWanted()) this.#openingFailed(explainFile(file, error));
    }
    return undefined;
  }

  #beginOpening() {
    this.#notices.clearAll();
    this.#setPhase("opening");
    const attempt = ++this.#opening;
    return () => attempt === this.#opening;
  }

  #openingFailed(text) {
    this.#notices.show("opening", "error", text);
    this.#setPhase("idle");
  }

  #begin(run, source) {
    this.#run = this.#newest = run;
    run.source = source;
    run.delays = new Delays(source.rate_hz);
    const audio = { encoding: "s16le", sample_rate_hz: source.rate_hz, channels: 1 };
    run.connection = new Connection(streamUrl(location.href), { audio, ...this.#settings.hello }, {
      onLink: (link) => this.#link(run, link),
      onMessage: (message) => this.#message(run, message),
      onRoom: () => this.#room(run),
      onRestart: (n_moved_samples) => this.#restart(run, n_moved_samples),
    });
    this.#setPhase("running");
    this.#meter.reset();
    this.#showFigures(run);
    run.connection.start();
    if (!source.waitsForServer) source.start();
  }

  /** Everything said so far is still decoded. */
  async #finish(run) {
    if (run !== this.#run || run.isFinishing) return;
    run.isFinishing = true;
    this.#setPhase("finishing");
    await run.source.stop();
    run.connection.finish();
  }

  #microphoneLost(run) {
    this.#notices.show("opening", "error", "The microphone was disconnected.");
    this.#finish(run);
  }

  // ---------------------------------------------------------------- what the connection tells

  #link(run, link) {
    run.link = link.phase;
    if (link.phase === "closed") this.#closed(run, link);
    if (link.phase === "live") this.#live(run);
    this.#showLink();
    this.#showVerdict();
  }

  #live(run) {
    for (const key of ["too_slow", "internal", "shutting_down", "server_full"]) this.#notices.clear(key);
    if (!run.source.waitsForServer) return;
    run.source.waitsForServer = false;
    run.source.start();
  }

  #closed(run, link) {
    const trouble = explainEnding(link);
    if (trouble !== null) this.#notices.show(link.error?.code ?? "ending", "error", trouble);
    run.source.stop();
    // After a lost connection nothing else says that the speech is over.
    this.#apply(run, { type: "bye", audio_s: run.seconds(run.connection.endSample) });
    this.#showFigures(run);
    this.#meter.reset();
    this.#run = null;
    this.#setPhase("idle");
  }

  #room(run) {
    run.source.pump?.();
    this.#showFigures(run);
  }

  #restart(run, n_moved_samples) {
    run.delays.timeline.rebase(n_moved_samples);
    run.captions = NO_CAPTIONS;
    run.view = null;
    this.#meter.reset();
  }

  #message(run, message) {
    if (message.type === "ready") return this.#ready(run, message);
    if (message.type === "warning") return this.#notices.show(message.code, "warning", explainCode(message));
    if (message.type === "error") return this.#notices.show(message.code, "error", explainCode(message));
    if (message.type === "updated") return this.#tell("The new settings hold from here on.");
    if (message.type === "speech_ended") run.delays.speechEnded(message.end_s, performance.now());
    return this.#apply(run, message);
  }

  #ready(run, ready) {
    this.#settings.offer(ready.models);
    const late = ready.chunking ? ` Words settle ${ready.chunking.latency_ms} ms behind the voice.` : "";
    byId("engine").textContent = `Runs on ${ready.engine.backend}: ${ready.engine.why}.${late}`;
    if (run.view === null) this.#addView(run, ready.model);
  }

  #addView(run, model) {
    const began = new Date().toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
    const source = { name: run.name, detail: `${began} · ${model}` };
    run.view = new TranscriptView(byId("transcript-template"), source, (text) => this.#tell(text));
    byId("empty").hidden = true;
    byId("captions").append(run.view.element);
    this.#follower.toLatest();
  }

  #apply(run, message) {
    const before = run.captions;
    run.captions = reduce(before, message);
    if (run.captions === before) return;
    run.view?.show(run.captions);
    this.#follower.contentChanged();
    this.#meter.setSpeech(run.captions.speech);
    this.#showVerdict();
    if (message.type === "partial" || message.type === "final") this.#segmentShown(run, before, message.segment);
  }

  #segmentShown(run, before, segment_id) {
    const find = (captions) => captions.segments.find((segment) => segment.segment_id === segment_id);
    const [old, now] = [find(before), find(run.captions)];
    if (now === undefined) return; // taken back
    if (isFinal(now)) announceFinal(byId("announcer"), now);
    afterPaint((shown_at_ms) => {
      run.delays.segmentShown(old, now, shown_at_ms);
      this.#showFigures(run);
    });
  }

  // ---------------------------------------------------------------- sound

  #frame(run, { bytes, rms }) {
    if (run !== this.#run) return; // the source stops a moment later than the run
    const { connection, delays } = run;
    const start_s = run.seconds(connection.endSample);
    connection.sendAudio(bytes);
    delays.timeline.record(connection.endSample, performance.now());
    const end_s = run.seconds(connection.endSample);
    this.#meter.add(start_s, end_s, rms);
    byId("clock").textContent = shortTime(end_s);
    this.#watchForSilence(run, end_s - start_s, rms);
    this.#showProgress(run);
    this.#showFigures(run);
  }

  #watchForSilence(run, duration_s, rms) {
    if (run.source.n_samples !== undefined) return; // a file may well be silent
    run.silent_s = rms === 0 ? run.silent_s + duration_s : 0;
    if (rms > 0) this.#notices.clear("muted");
    else if (run.silent_s > SILENT_INPUT_S) this.#sayMuted(run);
  }

  #sayMuted(run) {
    run.silent_s = -Infinity; // once is enough
    const text = "The microphone gives no sound at all. It may be muted, by a switch or in the system’s settings.";
    this.#notices.show("muted", "warning", text);
  }

  // ---------------------------------------------------------------- what is shown

  #setPhase(phase) {
    this.#phase = phase;
    byId("record").dataset.phase = phase;
    byId("record-label").textContent = RECORD_WORDS[phase];
    this.#settings.setRunning(phase !== "idle");
    byId("choose").disabled = phase !== "idle";
    document.body.dataset.phase = phase;
    byId("progress").hidden = this.#run?.source.n_samples === undefined;
    this.#showLink();
    this.#showVerdict();
  }

  #showLink() {
    const run = this.#run;
    const isEnding = run?.isFinishing && run.link === "live";
    const link = run === null ? this.#phase : isEnding ? "finishing" : run.link;
    if (!(link in LINK_WORDS)) return;
    byId("link").dataset.phase = link;
    const text = byId("link-text");
    if (text.textContent !== LINK_WORDS[link]) text.textContent = LINK_WORDS[link];
  }

  #showVerdict() {
    const state = this.#verdict;
    byId("verdict").dataset.state = state;
    byId("verdict").textContent = VERDICT_WORDS[state];
  }

  /** What the server hears; nobody knows while the connection is away. */
  get #verdict() {
    if (this.#run === null) return "off";
    if (this.#run.link !== "live") return "waiting";
    return isSpeaking(this.#run.captions) ? "speech" : "silence";
  }

  #showFigures(run) {
    if (run !== this.#newest) return;
    const { delays, connection } = run;
    const ms = (median) => (run.isPaced && median.value !== null ? `${Math.round(median.value)} ms` : "–");
    byId("shown").textContent = ms(delays.shown_ms);
    byId("settled").textContent = ms(delays.settled_ms);
    byId("final").textContent = ms(delays.final_ms);
    const decided = ms(delays.decided_ms);
    byId("decided").textContent = decided === "–" ? "after the last word" : `${decided} after the pause`;
    byId("acked").textContent = `${run.seconds(connection.ackedSamples).toFixed(1)} s`;
    byId("acked-note").textContent = run.isPaced ? this.#underWay(run) : this.#speed(run);
  }

  #underWay(run) {
    if (run.link === "closed") return "by the server";
    const where = run.link === "live" ? "under way" : "kept here";
    return `${run.seconds(run.connection.heldSamples).toFixed(1)} s more ${where}`;
  }

  #speed(run) {
    const wall_s = (performance.now() - run.began_ms) / 1000;
    return `${(run.seconds(run.connection.ackedSamples) / wall_s).toFixed(1)} × playing speed`;
  }

  #showProgress(run) {
    const { source } = run;
    if (source.n_samples === undefined) return;
    byId("progress-bar").value = source.n_sent_samples / Math.max(1, source.n_samples);
    const [sent, all] = [source.n_sent_samples, source.n_samples].map((n_samples) => shortTime(run.seconds(n_samples)));
    byId("progress-text").textContent = `${sent} of ${all}`;
  }

  #tell(text) {
    this.#notices.show("told", "note", text);
  }

  // ---------------------------------------------------------------- controls

  /** Space and R, unless the key means something where the focus is. */
  #key(event) {
    const isShortcut = event.key === " " || event.key.toLowerCase() === "r";
    if (!isShortcut || event.repeat || event.ctrlKey || event.metaKey || event.altKey) return;
    const takesText = event.target.closest("input, select, textarea, [contenteditable]");
    const takesSpace = event.key === " " && event.target.closest("button, summary, a");
    if (takesText || takesSpace) return;
    event.preventDefault();
    this.#toggle();
  }

  #prepareFiles() {
    const [input, drop] = [byId("file"), byId("drop")];
    byId("choose").addEventListener("click", () => input.click());
    input.addEventListener("change", () => {
      if (input.files.length > 0) this.#startFile(input.files[0]);
      input.value = ""; // so that the same file can be chosen again
    });
    const holdsFiles = (event) => event.dataTransfer?.types.includes("Files");
    addEventListener("dragover", (event) => {
      if (holdsFiles(event)) event.preventDefault();
      drop.hidden = !holdsFiles(event);
    });
    addEventListener("dragleave", (event) => (drop.hidden = event.relatedTarget === null || drop.hidden));
    addEventListener("drop", (event) => {
      drop.hidden = true;
      if (!holdsFiles(event)) return;
      event.preventDefault();
      this.#startFile(event.dataTransfer.files[0]);
    });
    byId("speed").addEventListener("change", () => this.#showAloud());
    this.#showAloud();
  }

  #showAloud() {
    const isPaced = byId("speed").value === "paced";
    byId("aloud").disabled = !isPaced;
    byId("aloud-reason").textContent = isPaced ? "" : "Only at playing speed.";
  }

  #prepareTheme() {
    const show = (theme) => {
      document.documentElement.dataset.theme = theme;
      byId("theme").setAttribute("aria-label", `Colours: ${theme === "system" ? "as the system" : theme}`);
      this.#meter.redraw();
    };
    const stored = localStorage.getItem("theme");
    show(THEMES.includes(stored) ? stored : "system");
    byId("theme").addEventListener("click", () => {
      const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
      localStorage.setItem("theme", next);
      show(next);
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#meter.redraw());
  }

  async #fetchModels() {
    try {
      const response = await fetch("v1/models");
      if (!response.ok) throw new Error(`status ${response.status}`);
      this.#settings.offer((await response.json()).models);
    } catch (error) {
      this.#notices.show("models", "warning", `The server’s list of models can’t be had: ${error.message}`);
    }
  }
}

new Page();
