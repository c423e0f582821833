package release_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
)

// TestInstallScript runs scripts/install.sh against a server with a release.
func TestInstallScript(t *testing.T) {
	archive := releaseArchive(t)
	name := fmt.Sprintf("agent-sessionizer_1.2.0_%s_%s.tar.gz", runtime.GOOS, runtime.GOARCH)
	sum := fmt.Sprintf("%x  %s\n", sha256.Sum256(archive), name)
	wrong := fmt.Sprintf("%064d  %s\n", 0, name)
	for _, c := range []struct {
		name, sums, verifies string
		signed               bool
		problem              string
	}{
		{name: "correct", sums: sum},
		{name: "another checksum", sums: wrong, problem: "checksum of " + name + " is wrong"},
		{name: "not listed", sums: strings.Replace(sum, runtime.GOARCH, "mips", 1), problem: "lists no archive"},
		{name: "listed twice", sums: sum + wrong, problem: "lists several archives"},
		{name: "correct signature", sums: sum, verifies: "exit 0", signed: true},
		{name: "wrong signature", sums: sum, verifies: "exit 1", signed: true, problem: "signature of checksums.txt is wrong"},
		{name: "without signature", sums: sum, verifies: "exit 0", problem: "checksums.txt.minisig: "},
	} {
		t.Run(c.name, func(t *testing.T) {
			feed := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				switch r.URL.Path {
				case "/latest/download/checksums.txt":
					_, _ = w.Write([]byte(c.sums))
				case "/latest/download/" + name:
					_, _ = w.Write(archive)
				case "/latest/download/checksums.txt.minisig":
					if c.signed {
						return
					}
					fallthrough
				default:
					http.NotFound(w, r)
				}
			}))
			defer feed.Close()
			home := t.TempDir()
			tools := filepath.Join(home, "tools")
			if err := os.Mkdir(tools, 0o755); err != nil {
				t.Fatal(err)
			}
			if c.verifies != "" {
				if err := os.WriteFile(filepath.Join(tools, "minisign"), []byte("#!/bin/sh\n"+c.verifies+"\n"), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			dir := filepath.Join(home, "a directory")
			cmd := exec.CommandContext(t.Context(), "sh", "../../scripts/install.sh", "--dir", dir)
			cmd.Env = append(os.Environ(), "HOME="+home, "PATH="+tools+":"+os.Getenv("PATH"), "TMPDIR="+home, "AGENT_SESSIONIZER_RELEASES="+feed.URL, "NO_PROXY=*", "no_proxy=*")
			if c.verifies != "" {
				cmd.Env = append(cmd.Env, "AGENT_SESSIONIZER_RELEASE_KEY=key")
			}
			out, err := cmd.CombinedOutput()
			_, missing := os.Stat(filepath.Join(dir, "agent-sessionizer"))
			if c.problem == "" && (err != nil || missing != nil) {
				t.Errorf("install: %v, %v\n%s", err, missing, out)
			}
			if c.problem != "" && (err == nil || missing == nil || !strings.Contains(string(out), c.problem)) {
				t.Errorf("install: error %v, program %v, output %q, want nothing installed and %q", err, missing, out, c.problem)
			}
			if left, _ := filepath.Glob(filepath.Join(home, "tmp.*")); len(left) > 0 {
				t.Errorf("temporary files = %q, want none", left)
			}
		})
	}
}

func releaseArchive(t *testing.T) []byte {
	t.Helper()
	program := []byte("#!/bin/sh\necho agent-sessionizer v1.2.0\n")
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	w := tar.NewWriter(z)
	if err := w.WriteHeader(&tar.Header{Name: "agent-sessionizer", Mode: 0o755, Size: int64(len(program))}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(program); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}
