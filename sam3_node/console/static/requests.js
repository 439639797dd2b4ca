// Requests to the console's server, which passes them to the node.

/** An error of the node or the console: `code` and a message for people. */
export class RequestFailed extends Error {
  constructor(code, message) {
    super(message);
    this.code = code;
  }
}

/** Carry out an operation of the node and return its result. Throws RequestFailed. */
export async function call(op, args = {}) {
  return post(`api/${op}`, args);
}

/** Let the node look for names. Those that it looks for already keep their limits, which `status` has. */
export async function lookFor(names, status) {
  const keep = (values) => Object.fromEntries(Object.entries(values).filter(([name]) => names.includes(name)));
  const limits = Object.entries(status?.prompt_limits ?? {}).map(([limit, values]) => [limit, keep(values)]);
  return call("set_prompts", { prompts: names, ...Object.fromEntries(limits) });
}

/** Return the last picture of an object as a Blob. Throws RequestFailed. */
export async function fetchPicture({ camera, epoch, id }) {
  const { jpeg } = await call("picture", { camera, epoch, id });
  return new Blob([Uint8Array.from(atob(jpeg), (letter) => letter.charCodeAt(0))], { type: "image/jpeg" });
}

/** Return phrases of the node's vocabulary that resemble what was typed, all of them for "". */
export async function suggest(typed) {
  const answer = await fetch(`api/words?typed=${encodeURIComponent(typed)}`);
  return answer.ok ? (await answer.json()).words : [];
}

/** Exchange the token in the URL's fragment for a cookie, and remove it from the address bar. */
export async function logIn() {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (token === null) return;
  history.replaceState(null, "", location.pathname);
  await post("login", { token });
}

/** Return true if the server lets this page see the node. Throws if no server answers. */
export async function isAllowed() {
  return (await fetch("api/words")).status !== 401;
}

/** Return what the server shows of a page. Throws RequestFailed. */
export async function read(path) {
  return send(path, {});
}

async function post(path, args) {
  return send(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(args) });
}

async function send(path, options) {
  let answer;
  try {
    answer = await fetch(path, options);
  } catch {
    throw new RequestFailed("no_console", "the console does not answer; is it still running?");
  }
  const text = await answer.text();
  let body = {};
  try {
    body = JSON.parse(text);
  } catch {
    body = { error: { code: "refused", message: text } };
  }
  if (!answer.ok) throw new RequestFailed(body.error?.code ?? "refused", body.error?.message ?? text);
  return body;
}
