/**
 * Codes and exceptions in words that help a person.
 * Pure. Knows the codes of PROTOCOL.md and the names of the browser's exceptions.
 */

/** What each error or warning code means to the person at the page; the server's own message follows it. */
const CODES = {
  vocabulary_truncated: "Not all of the vocabulary fits into this model.",
  context_truncated: "Not all of the context fits into this model.",
  non_finite_samples: "The audio holds broken samples; they count as silence.",
  clipped_samples: "The audio is too loud in places and was clipped.",
  audio_suspect: "The audio looks wrong to the server.",
  incomplete_sample: "The audio ended inside a sample.",
  lagging: "The server is behind; words come late.",
  bad_message: "The server did not accept what this page sent.",
  unsupported_audio: "The server does not take audio in this form.",
  unknown_model: "The server no longer offers this model.",
  missing_capability: "This model lacks something that was asked for.",
  unsupported_option: "This model can't do what was asked for.",
  decode_failed: "The model failed on a piece of the audio; the words of that piece are missing.",
  unknown_session: "The session could not be taken up again. A new one begins with the audio that was kept.",
  hello_timeout: "The connection took too long to begin.",
  too_slow: "This page did not keep up with the server.",
  taken_over: "The session was taken over by another page.",
  server_full: "The server is full. Please try again in a while.",
  internal: "Something went wrong in the server.",
  shutting_down: "The server is going down.",
  protocol_version: "This page and the server are of different versions. Reload the page.",
};

/** Codes whose sentence says everything; the server's message would only repeat it. */
const SELF_EXPLAINING = new Set(["unknown_session", "server_full", "shutting_down", "taken_over", "hello_timeout"]);

const MICROPHONE = {
  NotAllowedError:
    "The microphone is blocked. Allow it for this page: the button left of the address opens the permissions. " +
    "Then press Start again.",
  NotFoundError: "No microphone was found. Connect one, or open an audio file instead.",
  NotReadableError: "The microphone can't be opened. Another program may be using it.",
  OverconstrainedError: "The microphone can't be used with these settings.",
  InsecureContextError:
    "Browsers give the microphone only to safe pages. Open this page over HTTPS or as localhost, or use an audio file.",
};

/** @param {{code: string, message: string}} problem a warning or an error of the server */
export function explainCode({ code, message }) {
  const words = CODES[code];
  if (words === undefined) return `${code}: ${message}`;
  return SELF_EXPLAINING.has(code) || !message ? words : `${words} (${message})`;
}

/** @param {Error} error of opening the microphone */
export function explainMicrophone(error) {
  return MICROPHONE[error.name] ?? `The microphone can't be opened: ${error.message}`;
}

/** @param {File} file @param {Error} error of decoding it */
export function explainFile(file, error) {
  if (error.name === "EncodingError") return `“${file.name}” is not audio that this browser can read.`;
  return `“${file.name}” can't be read: ${error.message}`;
}

/** Why a link closed, or null where nothing is wrong. @param {import("./connection.js").Link} link */
export function explainEnding(link) {
  switch (link.outcome) {
    case "bye":
    case "abandoned":
      return null;
    case "unreachable":
      return "The server can't be reached. Check that it runs, then press Start again.";
    case "lost":
      return "The connection was lost and did not come back. The words up to then are kept.";
    case "overfull":
      return "The server has taken no audio for five minutes, so the session was ended. The words up to then are kept.";
    default:
      return explainCode(link.error);
  }
}

/** A language code in the page's language: `de` → German. */
export function languageName(code) {
  try {
    return new Intl.DisplayNames(["en"], { type: "language" }).of(code);
  } catch (error) {
    if (error instanceof RangeError) return code; // not a well-formed language tag
    throw error;
  }
}
