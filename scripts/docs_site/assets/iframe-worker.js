// The search of the theme runs in a worker.  Browsers make no worker for a page that was opened as
// a file, so there a hidden frame runs the worker's script, on the page's own thread.
if (location.protocol === "file:") {
  // As between threads: a message is a copy, and arrives later.
  const deliver = (data, receive) => {
    const copy = structuredClone(data);
    setTimeout(() => receive(new MessageEvent("message", { data: copy })));
  };

  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.documentElement.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => deliver(data, (message) => {
        this.dispatchEvent(message);
        if (this.onmessage) this.onmessage(message);
      });
      const script = inside.document.createElement("script");
      script.src = new URL(url, location.href);
      this.loaded = new Promise((resolve) => script.addEventListener("load", resolve));
      inside.document.head.append(script);
    }

    postMessage(data) {
      deliver(data, async (message) => {
        await this.loaded;
        this.frame.contentWindow?.onmessage(message);
      });
    }

    terminate() {
      this.frame.remove();
    }
  };
}
