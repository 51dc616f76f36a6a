// Where the chats are listed: beside the conversation where the screen is wide, else in a dialog.

import { byId } from "./dom.js";

/** Where there is room for a third column, as in style.css. */
const WIDE = "(min-width: 84rem)";
/** Whether the column was closed at the last visit. */
const CLOSED = "forethought.side.closed";

/** The column or dialog of the chats. */
export class Side {
  /** @param {() => void} onShow called when it comes into sight */
  constructor(onShow) {
    this.onShow = onShow;
    this.column = byId("side");
    this.dialog = byId("chats");
    this.panel = byId("chats-panel");
    this.opener = byId("open-chats");
    this.isClosed = localStorage.getItem(CLOSED) !== null;
    this.isWide = matchMedia(WIDE);
    this.isWide.addEventListener("change", () => this.place());
    this.opener.addEventListener("click", () => (this.isOpen ? this.close() : this.show()));
    byId("close-chats").addEventListener("click", () => this.close());
    this.place();
  }

  get isOpen() {
    return this.dialog.open || !this.column.hidden;
  }

  /** Shows it with the focus in the search. */
  find() {
    this.show();
    byId("chat-filter").focus();
  }

  show() {
    if (this.isWide.matches) return this.keep(false);
    if (!this.dialog.open) this.dialog.showModal();
    this.onShow();
  }

  close() {
    if (!this.isWide.matches) return this.dialog.close();
    this.keep(true);
    this.opener.focus();
  }

  /** A chat was chosen: the dialog gives way to it, the column stays. */
  choose() {
    this.dialog.close();
  }

  /** @private @param {boolean} isClosed */
  keep(isClosed) {
    this.isClosed = isClosed;
    if (isClosed) localStorage.setItem(CLOSED, "true");
    else localStorage.removeItem(CLOSED);
    this.place();
  }

  /** @private Puts the list where it belongs. */
  place() {
    const isWide = this.isWide.matches;
    const home = isWide ? this.column : this.dialog;
    if (isWide) this.dialog.close();
    if (this.panel.parentElement !== home) home.append(this.panel);
    const wasOpen = !this.column.hidden;
    this.column.hidden = !isWide || this.isClosed;
    if (isWide) this.opener.removeAttribute("aria-haspopup");
    else this.opener.setAttribute("aria-haspopup", "dialog");
    if (isWide) this.opener.setAttribute("aria-expanded", String(!this.column.hidden));
    else this.opener.removeAttribute("aria-expanded");
    if (!wasOpen && !this.column.hidden) this.onShow();
  }
}
