// Elements, made without HTML text: whatever a model writes reaches the page as a text node.

/** @typedef {string | number | Node | null | undefined | false} Child */

/**
 * An element.
 * @template {keyof HTMLElementTagNameMap} T
 * @param {T} tag
 * @param {Record<string, any>} [props] `class`, `on<event>` listeners, `aria-...` and other attributes; null leaves one out
 * @param {...(Child | Child[])} children strings become text nodes
 * @returns {HTMLElementTagNameMap[T]}
 */
export function el(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") /** @type {any} */ (element).value = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...present(children));
  return element;
}

/** @param {(Child | Child[])[]} children @returns {(string | Node)[]} */
function present(children) {
  const flat = /** @type {Child[]} */ (children.flat());
  return flat.filter((c) => c !== null && c !== undefined && c !== false).map((c) => (c instanceof Node ? c : String(c)));
}

/** Replaces what is in `parent`. @param {Element} parent @param {...(Child | Child[])} children */
export function fill(parent, ...children) {
  parent.replaceChildren(...present(children));
}

/** The element with this id. @param {string} id @returns {any} */
export function byId(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`the page has no #${id}`);
  return found;
}

/** A button that is words alone. @param {string} text @param {() => void} onclick @param {string} [label] for screen readers */
export function quietButton(text, onclick, label) {
  return el("button", { type: "button", class: "quiet", "aria-label": label ?? null, onclick }, text);
}

/** A button that has to be pressed twice. @param {string} text @param {() => void} onclick @param {string} label for screen readers */
export function careful(text, onclick, label) {
  const element = quietButton(text, () => (element.dataset.armed ? onclick() : arm()), label);
  const arm = () => {
    element.dataset.armed = "true";
    element.textContent = "Really?";
    element.setAttribute("aria-label", `Really? ${label}: press again`);
  };
  return element;
}

/** Offers a text as a file. @param {string} name @param {string} type @param {string} text */
export function download(name, type, text) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const link = el("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
