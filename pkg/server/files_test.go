package server

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"mime"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
)

// bring puts files among a task's artifacts, as its keeper does.
func (r *rig) bring(id string, files map[string][]byte) {
	r.t.Helper()
	var list []task.Artifact
	for name, content := range files {
		path := filepath.Join(string(r.tasks.Dir(id)), "outbox", "artifacts", filepath.FromSlash(name))
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			r.t.Fatal(err)
		}
		if err := os.WriteFile(path, content, 0o600); err != nil {
			r.t.Fatal(err)
		}
		sum := sha256.Sum256(content)
		list = append(list, task.Artifact{Name: name, Size: int64(len(content)), SHA256: hex.EncodeToString(sum[:])})
	}
	r.move(id, task.Completed, func(f *task.Status) {
		f.Artifacts = list
		f.Skipped = []task.Skipped{{Name: "link", Reason: "a symbolic link"}}
	})
}

func TestArtifacts(t *testing.T) {
	r := newRig(t, Limits{})
	id := r.submit().ID
	files := map[string][]byte{
		id + ".patch": []byte("diff --git a b\n"), "files/report.html": []byte("<script>alert(1)</script>"), "files/empty": {},
		"files/with space.txt": []byte("a"), "files/percent%2e.txt": []byte("b"), "files/ünïcode": []byte("c"), "files/new\nline": []byte("d"),
		`files/quo"te`: []byte("e"), "files/question?mark#x": []byte("f"), "files/semi;colon": []byte("g"), `files/back\slash`: []byte("h"), "files/...": []byte("i"),
		"files/big": bytes.Repeat([]byte("0123456789"), 100_000),
	}
	r.bring(id, files)
	var list ArtifactList
	r.get(call{path: tasksPath + "/" + id + "/artifacts", as: Read}, &list)
	if len(list.Artifacts) != len(files) || len(list.Skipped) != 1 {
		t.Fatalf("%+v", list)
	}
	for _, a := range list.Artifacts {
		for _, escaped := range []string{url.PathEscape(a.Name), (&url.URL{Path: a.Name}).EscapedPath()} {
			escaped = strings.TrimPrefix(escaped, "./")
			c := call{path: tasksPath + "/" + id + "/artifacts/" + escaped, as: Read}
			resp, body := r.do(c)
			if resp.StatusCode != http.StatusOK || !bytes.Equal(body, files[a.Name]) {
				t.Errorf("%q as %s: %s, %d bytes", a.Name, escaped, resp.Status, len(body))
				continue
			}
			h := resp.Header
			kind, params, err := mime.ParseMediaType(h.Get("Content-Disposition"))
			if err != nil || kind != "attachment" || params["filename"] != filepath.Base(a.Name) {
				t.Errorf("%q: %q is %s %q %v", a.Name, h.Get("Content-Disposition"), kind, params["filename"], err)
			}
			if h.Get("ETag") != `"`+a.SHA256+`"` || h.Get("Content-Type") != "application/octet-stream" || !strings.Contains(h.Get("Content-Security-Policy"), "sandbox") {
				t.Error(h)
			}
			c.header = []string{"If-None-Match", h.Get("ETag")}
			if resp, body := r.do(c); resp.StatusCode != http.StatusNotModified || len(body) > 0 {
				t.Error(resp.Status)
			}
		}
	}
	big := call{path: tasksPath + "/" + id + "/artifacts/files/big", as: Read}
	for rng, want := range map[string]string{"bytes=0-3": "0123", "bytes=999995-": "56789", "bytes=-2": "89", "bytes=12-12": "2"} {
		big.header = []string{"Range", rng}
		resp, body := r.do(big)
		if resp.StatusCode != http.StatusPartialContent || string(body) != want {
			t.Errorf("%s: %s %q", rng, resp.Status, body)
		}
	}
	big.header = []string{"Range", "bytes=0-3", "If-Range", `"another"`}
	if resp, body := r.do(big); resp.StatusCode != http.StatusOK || len(body) != 1_000_000 {
		t.Error(resp.Status, len(body))
	}
	big.header = []string{"Range", "bytes=1000000-"}
	if resp, _ := r.do(big); resp.StatusCode != http.StatusRequestedRangeNotSatisfiable || resp.Header.Get("Content-Range") != "bytes */1000000" {
		t.Error(resp.Status, resp.Header)
	}
	big.header = []string{"Range", "bytes=" + strings.TrimSuffix(strings.Repeat("0-999999,", 1000), ",")}
	if resp, body := r.do(big); len(body) > 3_000_000 {
		t.Error("ranges multiply what is sent:", resp.Status, len(body))
	}
	big.header, big.method = nil, http.MethodHead
	if resp, body := r.do(big); resp.StatusCode != http.StatusOK || len(body) > 0 || resp.ContentLength != 1_000_000 {
		t.Error(resp.Status, resp.ContentLength)
	}
	if err := os.WriteFile(r.tasks.Dir(id).Bundle(), []byte("bundle"), 0o600); err != nil {
		t.Fatal(err)
	}
	resp, body := r.do(call{path: tasksPath + "/" + id + "/bundle", as: Read})
	if string(body) != "bundle" || !strings.Contains(resp.Header.Get("Content-Disposition"), id+".tar.gz") {
		t.Error(resp.Header, string(body))
	}
}

func TestLogs(t *testing.T) {
	r := newRig(t, Limits{})
	id := r.submit().ID
	dir := r.tasks.Dir(id)
	get := func(query, rng string) (*http.Response, string) {
		c := call{path: tasksPath + "/" + id + "/logs" + query, as: Read}
		if rng != "" {
			c.header = []string{"Range", rng}
		}
		resp, body := r.do(c)
		return resp, string(body)
	}
	if resp, body := get("", ""); resp.StatusCode != http.StatusOK || body != "" || resp.Header.Get("X-Log-Size") != "0" {
		t.Error(resp.Status, body)
	}
	for path, text := range map[string]string{dir.Stdout(): "0123456789", dir.Stderr(): "\x1b[31m<b>\xff"} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct{ query, rng, want string }{
		{"", "", "0123456789"},
		{"?offset=4", "", "456789"},
		{"?offset=10", "", ""},
		{"?stream=stderr", "", "\x1b[31m<b>\xff"},
		{"", "bytes=2-3", "23"},
		{"?offset=4", "bytes=1-2", "56"},
		{"?stream=stdout&offset=1", "bytes=-1", "9"},
	} {
		resp, body := get(c.query, c.rng)
		if body != c.want || resp.Header.Get("Content-Type") != textType {
			t.Errorf("%s %s: %s %q", c.query, c.rng, resp.Status, body)
		}
		if size := resp.Header.Get("X-Log-Size"); c.query == "" && size != "10" {
			t.Error(size)
		}
	}
	if resp, body := get("?offset=11", ""); resp.StatusCode != http.StatusRequestedRangeNotSatisfiable || !strings.Contains(body, "offset=10") {
		t.Error(resp.Status, body)
	}
}

func TestSystemdQuote(t *testing.T) {
	for arg, want := range map[string]string{
		"/usr/bin/x": "/usr/bin/x", "--listen": "--listen", "a b": `"a b"`, `a"b`: `"a\"b"`, "50%": `"50%%"`, "$HOME": `"$$HOME"`, `a\b`: `"a\\b"`, "": `""`, "a;b": `"a;b"`,
	} {
		if got, err := systemdQuote(arg); err != nil || got != want {
			t.Errorf("%q: %s %v", arg, got, err)
		}
	}
	for _, arg := range []string{"a\nb", "a\x00", "a\rb"} {
		if got, err := systemdQuote(arg); err == nil {
			t.Errorf("%q: %s", arg, got)
		}
	}
}
