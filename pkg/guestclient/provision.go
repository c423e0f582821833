package guestclient

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"io/fs"
	"strings"
	"sync"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

const provisionPath = "/usr/local/lib/agent-sessionizer/provision"

// Provisioner runs the provision scripts in a guest.
type Provisioner struct {
	Guest   Guest
	Scripts fs.FS
	Source  string       // the distribution ("ubuntu", "debian")
	Report  func(string) // receives the scripts' lines
}

// Provision runs the steps that the guest has not completed yet. In an image that was
// built with them there is nothing to do.
func (r Provisioner) Provision(ctx context.Context) error {
	dir, err := r.unpack(ctx)
	if err != nil {
		return err
	}
	steps, err := newStepLines(r.Scripts)
	if err != nil {
		return fmt.Errorf("read the provision scripts: %w", err)
	}
	if err := r.run(ctx, dir, "run.sh", func(line string) { r.Report(steps.line(line)) }); err != nil {
		if out, aerr := r.Guest.SSH.Output(ctx, "command -v apt-get || true", nil, maxReply); aerr == nil && len(out) == 0 {
			return fail.New(fail.Usage, "provision the guest: its image has no apt-get; images must be Debian, Ubuntu or derived from them").
				WithHint("agent-sessionizer config edit # or pass another --image")
		}
		return fail.New(fail.Failure, "provision the guest: %w", err).
			WithHint("agent-sessionizer ssh SESSION -- sudo tail -n 50 /var/log/agent-provision.log")
	}
	return nil
}

// ScriptsKey returns a key that changes whenever the scripts do.
func ScriptsKey(scripts fs.FS) (string, error) {
	_, key, err := archive(scripts)
	return key, err
}

func archive(scripts fs.FS) (*bytes.Buffer, string, error) {
	out := new(bytes.Buffer)
	if err := pack(scripts, out); err != nil {
		return nil, "", fmt.Errorf("pack the provision scripts: %w", err)
	}
	sum := sha256.Sum256(out.Bytes())
	return out, hex.EncodeToString(sum[:6]), nil
}

// unpack puts the scripts into the guest, unless they are already there, and returns
// their directory.
func (r Provisioner) unpack(ctx context.Context) (dir string, err error) {
	packed, key, err := archive(r.Scripts)
	if err != nil {
		return "", err
	}
	// Each content has its own folder, so an interrupted or older copy never mixes with
	// this one.
	dir = provisionPath + "-" + key
	unpack := `set -e; [ -d "$1" ] && { cat >/dev/null; exit 0; }; rm -rf "$1.new"; mkdir -p "$1.new"; tar -xzf - -C "$1.new"; mv "$1.new" "$1"`
	if _, err := r.Guest.SSH.Output(ctx, ssh.Quote("sudo", "sh", "-c", unpack, "sh", dir), packed, maxReply); err != nil {
		return "", fmt.Errorf("copy the provision scripts: %w", err)
	}
	return dir, nil
}

// run runs one of the scripts in dir as root; its error quotes the last lines.
func (r Provisioner) run(ctx context.Context, dir, name string, report func(string)) error {
	out := &progress{report: report}
	err := r.Guest.SSH.Run(ctx, ssh.Quote("sudo", "env", "AGENT_USER="+User, "AGENT_SOURCE="+r.Source, "IN_CHROOT=0",
		"PROVISION_DIR="+dir, "PROVISION_LOG=/var/log/agent-provision.log", "bash", dir+"/"+name), ssh.IO{Stdout: out, Stderr: out})
	out.end()
	if err != nil {
		return fmt.Errorf("%w; last output: %s", err, strings.Join(out.tail, " | "))
	}
	return nil
}

// progress splits a step's output into lines of limited length. It receives both stdout
// and stderr, which SSH writes from two goroutines.
type progress struct {
	report func(string)

	mu   sync.Mutex
	buf  []byte
	tail []string // the last lines
}

const (
	maxLine = 500 // bytes of one line; the rest of the line is dropped
	maxTail = 6   // lines
)

func (p *progress) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range b {
		switch {
		case c == '\n' || c == '\r':
			p.flush()
		case len(p.buf) < maxLine:
			p.buf = append(p.buf, c)
		}
	}
	return len(b), nil
}

// end reports the text after the last newline as a line.
func (p *progress) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.flush()
}

func (p *progress) flush() {
	line := termtext.Line(string(p.buf))
	p.buf = p.buf[:0]
	if line == "" {
		return
	}
	if p.tail = append(p.tail, line); len(p.tail) > maxTail {
		p.tail = p.tail[1:]
	}
	p.report(line)
}

// pack writes scripts as a tar whose bytes depend only on their content.
func pack(scripts fs.FS, w io.Writer) error {
	z := gzip.NewWriter(w)
	t := tar.NewWriter(z)
	err := fs.WalkDir(scripts, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := fs.ReadFile(scripts, name)
		if err != nil {
			return err
		}
		if err := t.WriteHeader(&tar.Header{Name: name, Mode: 0o755, Size: int64(len(text)), Typeflag: tar.TypeReg}); err != nil {
			return err
		}
		_, err = t.Write(text)
		return err
	})
	if err != nil {
		return err
	}
	if err := t.Close(); err != nil {
		return err
	}
	return z.Close()
}
