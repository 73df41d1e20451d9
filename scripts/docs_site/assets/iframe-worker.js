// The search of the theme runs in a worker.  Browsers make no worker for a page that was opened as
// a file, so there a hidden frame does its work: same messages, same script, one thread.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.addEventListener("load", () => this.begin(url), { once: true });
      document.documentElement.append(this.frame);
    }

    begin(url) {
      if (this.inside) return;
      this.inside = this.frame.contentWindow;
      this.inside.importScripts = (...urls) => urls.forEach((one) => this.run(one));
      this.inside.postMessage = (data) => {
        const message = new MessageEvent("message", { data });
        this.dispatchEvent(message);
        if (this.onmessage) this.onmessage(message);
      };
      this.run(url, () => this.waiting.splice(0).forEach((data) => this.send(data)));
    }

    run(url, then) {
      const script = this.inside.document.createElement("script");
      script.src = url;
      script.addEventListener("load", () => { this.ready = true; if (then) then(); });
      this.inside.document.body.append(script);
    }

    send(data) {
      this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data }));
    }

    postMessage(data) {
      if (this.ready) this.send(data);
      else this.waiting.push(data);
    }

    terminate() {
      this.frame.remove();
    }
  };
}
