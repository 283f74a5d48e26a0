// The site's search runs in a worker, which browsers refuse to pages that are opened from a disk.
// There, a hidden frame with the same global names takes its place.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = "<!DOCTYPE html><title>search</title>";
      this.frame.onload = () => this.start(String(new URL(url, document.baseURI)));
      document.documentElement.append(this.frame);
    }

    start(url) {
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        this.onmessage?.(event);
      };
      const load = (place) => new Promise((done, failed) => {
        const script = inside.document.createElement("script");
        script.onload = done;
        script.onerror = failed;
        script.src = place;
        inside.document.head.append(script);
      });
      inside.importScripts = (...places) => Promise.all(places.map((place) => load(String(new URL(place, url)))));
      load(url).then(() => {
        this.send = (data) => inside.dispatchEvent(new inside.MessageEvent("message", { data }));
        this.waiting.forEach(this.send);
      });
    }

    postMessage(data) {
      if (this.send) this.send(data);
      else this.waiting.push(data);
    }

    terminate() {
      this.frame.remove();
    }
  };
}
