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

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
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
	var list ops.ArtifactList
	r.get(call{path: ops.TasksPath + "/" + id + "/artifacts", as: ops.Read}, &list)
	if len(list.Artifacts) != len(files) || len(list.Skipped) != 1 {
		t.Fatalf("artifacts = %+v, want %d and 1 skipped", list, len(files))
	}
	for _, a := range list.Artifacts {
		for _, escaped := range []string{url.PathEscape(a.Name), (&url.URL{Path: a.Name}).EscapedPath()} {
			escaped = strings.TrimPrefix(escaped, "./")
			c := call{path: ops.TasksPath + "/" + id + "/artifacts/" + escaped, as: ops.Read}
			resp, body := r.do(c)
			if resp.StatusCode != http.StatusOK || !bytes.Equal(body, files[a.Name]) {
				t.Errorf("artifact %q as %s = %s, %d bytes, want %d, %d bytes", a.Name, escaped, resp.Status, len(body), http.StatusOK, len(files[a.Name]))
				continue
			}
			h := resp.Header
			kind, params, err := mime.ParseMediaType(h.Get("Content-Disposition"))
			if err != nil || kind != "attachment" || params["filename"] != filepath.Base(a.Name) {
				t.Errorf("Content-Disposition of %q = %q, %v, want attachment %q", a.Name, h.Get("Content-Disposition"), err, filepath.Base(a.Name))
			}
			if h.Get("ETag") != `"`+a.SHA256+`"` || h.Get("Content-Type") != "application/octet-stream" || !strings.Contains(h.Get("Content-Security-Policy"), "sandbox") {
				t.Errorf("headers of %q = %v, want ETag %q, application/octet-stream, sandbox", a.Name, h, a.SHA256)
			}
			c.header = []string{"If-None-Match", h.Get("ETag")}
			if resp, body := r.do(c); resp.StatusCode != http.StatusNotModified || len(body) > 0 {
				t.Errorf("GET of %q with its ETag = %s, %d bytes, want %d, 0", a.Name, resp.Status, len(body), http.StatusNotModified)
			}
		}
	}
	big := call{path: ops.TasksPath + "/" + id + "/artifacts/files/big", as: ops.Read}
	for rng, want := range map[string]string{"bytes=0-3": "0123", "bytes=999995-": "56789", "bytes=-2": "89", "bytes=12-12": "2"} {
		big.header = []string{"Range", rng}
		resp, body := r.do(big)
		if resp.StatusCode != http.StatusPartialContent || string(body) != want {
			t.Errorf("range %s = %s %q, want %d, %q", rng, resp.Status, body, http.StatusPartialContent, want)
		}
	}
	big.header = []string{"Range", "bytes=0-3", "If-Range", `"another"`}
	if resp, body := r.do(big); resp.StatusCode != http.StatusOK || len(body) != 1_000_000 {
		t.Errorf("range with another If-Range = %s, %d bytes, want %d, 1000000", resp.Status, len(body), http.StatusOK)
	}
	big.header = []string{"Range", "bytes=1000000-"}
	if resp, _ := r.do(big); resp.StatusCode != http.StatusRequestedRangeNotSatisfiable || resp.Header.Get("Content-Range") != "bytes */1000000" {
		t.Errorf("range beyond the end = %s, headers %v, want %d, bytes */1000000", resp.Status, resp.Header, http.StatusRequestedRangeNotSatisfiable)
	}
	big.header = []string{"Range", "bytes=" + strings.TrimSuffix(strings.Repeat("0-999999,", 1000), ",")}
	if resp, body := r.do(big); len(body) > 3_000_000 {
		t.Errorf("1000 ranges = %s, %d bytes, want at most 3000000", resp.Status, len(body))
	}
	big.header, big.method = nil, http.MethodHead
	if resp, body := r.do(big); resp.StatusCode != http.StatusOK || len(body) > 0 || resp.ContentLength != 1_000_000 {
		t.Errorf("HEAD = %s, %d bytes, length %d, want %d, 0, 1000000", resp.Status, len(body), resp.ContentLength, http.StatusOK)
	}
	if err := os.WriteFile(r.tasks.Dir(id).Bundle(), []byte("bundle"), 0o600); err != nil {
		t.Fatal(err)
	}
	resp, body := r.do(call{path: ops.TasksPath + "/" + id + "/bundle", as: ops.Read})
	if string(body) != "bundle" || !strings.Contains(resp.Header.Get("Content-Disposition"), id+".tar.gz") {
		t.Errorf("bundle = %q, headers %v, want \"bundle\" as %s.tar.gz", body, resp.Header, id)
	}
}

func TestLogs(t *testing.T) {
	r := newRig(t, Limits{})
	id := r.submit().ID
	dir := r.tasks.Dir(id)
	get := func(query, rng string) (*http.Response, string) {
		c := call{path: ops.TasksPath + "/" + id + "/logs" + query, as: ops.Read}
		if rng != "" {
			c.header = []string{"Range", rng}
		}
		resp, body := r.do(c)
		return resp, string(body)
	}
	if resp, body := get("", ""); resp.StatusCode != http.StatusOK || body != "" || resp.Header.Get("X-Log-Size") != "0" {
		t.Errorf("log before the start = %s %q, size %q, want %d, nothing, 0", resp.Status, body, resp.Header.Get("X-Log-Size"), http.StatusOK)
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
			t.Errorf("log %s %s = %s %q, want %q as %s", c.query, c.rng, resp.Status, body, c.want, textType)
		}
		if size := resp.Header.Get("X-Log-Size"); c.query == "" && size != "10" {
			t.Errorf("X-Log-Size = %q, want 10", size)
		}
	}
	if resp, body := get("?offset=11", ""); resp.StatusCode != http.StatusRequestedRangeNotSatisfiable || !strings.Contains(body, "offset=10") {
		t.Errorf("log beyond its end = %s %s, want %d, offset=10", resp.Status, body, http.StatusRequestedRangeNotSatisfiable)
	}
}

func TestSystemdQuote(t *testing.T) {
	for arg, want := range map[string]string{
		"/usr/bin/x": "/usr/bin/x", "--listen": "--listen", "a b": `"a b"`, `a"b`: `"a\"b"`, "50%": `"50%%"`, "$HOME": `"$$HOME"`, `a\b`: `"a\\b"`, "": `""`, "a;b": `"a;b"`,
	} {
		if got, err := systemdQuote(arg); err != nil || got != want {
			t.Errorf("systemdQuote(%q) = %s, %v, want %s", arg, got, err, want)
		}
	}
	for _, arg := range []string{"a\nb", "a\x00", "a\rb"} {
		if got, err := systemdQuote(arg); err == nil {
			t.Errorf("systemdQuote(%q) = %s, nil, want an error", arg, got)
		}
	}
}
