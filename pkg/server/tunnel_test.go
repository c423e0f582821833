package server

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coder/websocket"
	xssh "golang.org/x/crypto/ssh"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/audit"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/client"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// guestAt makes ep the address of a session's guest, and creates the session's key.
func (r *rig) guestAt(id string, ep vm.Endpoint) (authorized string) {
	r.t.Helper()
	key, authorized, err := ssh.NewKey()
	if err != nil {
		r.t.Fatal(err)
	}
	dir := r.tasks.Sessions.Config.Paths.SessionDir(id)
	status, err := json.Marshal(session.Status{Endpoint: ep})
	if err := errors.Join(err, os.MkdirAll(dir, 0o700), os.WriteFile(filepath.Join(dir, "ssh_key"), key, 0o600)); err != nil {
		r.t.Fatal(err)
	}
	if _, err := r.store.Update(r.t.Context(), id, func(row *store.Session) (store.Event, error) {
		row.Status = status
		return store.Event{}, nil
	}); err != nil {
		r.t.Fatal(err)
	}
	return authorized
}

// rawGuest makes a listener the guest of a session.
func (r *rig) rawGuest(id string) net.Listener {
	r.t.Helper()
	l, err := (&net.ListenConfig{}).Listen(r.t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { _ = l.Close() })
	r.guestAt(id, vm.Endpoint{Addr: l.Addr().String(), User: "agent", HostKey: "unused"})
	return l
}

// connectGuest opens a tunnel, and returns its two ends.
func (r *rig) connectGuest(id string, l net.Listener) (near, guest net.Conn) {
	r.t.Helper()
	c, err := r.openTunnel(id, ops.Admin)
	if err != nil {
		r.t.Fatal(err)
	}
	if guest, err = l.Accept(); err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { _ = guest.Close() })
	return c, guest
}

func (r *rig) openTunnel(id string, as ops.Scope) (net.Conn, error) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), deadline)
	r.t.Cleanup(cancel)
	c, _, err := websocket.Dial(ctx, "ws://"+r.addr+strings.Replace(ops.Tunnel.Path, "{id}", id, 1), &websocket.DialOptions{
		HTTPHeader: http.Header{"Authorization": {"Bearer " + r.token[as]}},
	})
	if err != nil {
		return nil, err
	}
	r.t.Cleanup(func() { _ = c.CloseNow() })
	return websocket.NetConn(ctx, c, websocket.MessageBinary), nil
}

// closes checks that a connection ends within the test's deadline.
func closes(t *testing.T, what string, c net.Conn) {
	t.Helper()
	if err := c.SetReadDeadline(time.Now().Add(deadline)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%s: the guest's connection is open, want it closed", what)
	}
}

// TestTunnel checks that a tunnel carries every byte, and ends when it should.
func TestTunnel(t *testing.T) {
	const id = "dddd11112222"
	data := make([]byte, 8<<20)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(data)

	t.Run("carries every byte", func(t *testing.T) {
		r := newRig(t, Limits{})
		r.session(id)
		near, guest := r.connectGuest(id, r.rawGuest(id))
		go func() { // the guest answers with what it receives, and leaves
			_, _ = io.CopyN(guest, guest, int64(len(data)))
			_ = guest.Close()
		}()
		go func() { _, _ = near.Write(data) }()
		if got, err := io.ReadAll(near); err != nil || !bytes.Equal(got, data) {
			t.Errorf("answer = %d bytes, %v, want the %d bytes that were sent, and the end", len(got), err, len(data))
		}
	})

	t.Run("waits for a slow reader", func(t *testing.T) {
		r := newRig(t, Limits{Tunnel: time.Second})
		r.session(id)
		near, guest := r.connectGuest(id, r.rawGuest(id))
		go func() {
			_, _ = guest.Write(data)
			_ = guest.Close()
		}()
		var got bytes.Buffer
		began := time.Now()
		for got.Len() < len(data) {
			if _, err := io.CopyN(&got, near, 64<<10); err != nil {
				t.Fatalf("read = %v after %d bytes, want %d bytes", err, got.Len(), len(data))
			}
			<-time.After(15 * time.Millisecond)
		}
		if took := time.Since(began); !bytes.Equal(got.Bytes(), data) || took < time.Second {
			t.Errorf("the bytes were right: %t, after %v, want them, for longer than the limit of one part", bytes.Equal(got.Bytes(), data), took)
		}
	})

	t.Run("ends with a client that reads nothing", func(t *testing.T) {
		r := newRig(t, Limits{Tunnel: 200 * time.Millisecond})
		r.session(id)
		_, guest := r.connectGuest(id, r.rawGuest(id))
		_ = guest.SetWriteDeadline(time.Now().Add(deadline))
		for {
			if _, err := guest.Write(data); err != nil {
				if errors.Is(err, os.ErrDeadlineExceeded) {
					t.Error("the guest's connection is open, want it closed")
				}
				return
			}
		}
	})

	t.Run("ends with a guest that reads nothing", func(t *testing.T) {
		r := newRig(t, Limits{Tunnel: 200 * time.Millisecond})
		r.session(id)
		near, _ := r.connectGuest(id, r.rawGuest(id))
		for { // the connection has the test's deadline
			if _, err := near.Write(data); err != nil {
				if errors.Is(err, context.DeadlineExceeded) {
					t.Error("the tunnel is open, want it closed")
				}
				return
			}
		}
	})

	t.Run("ends with its client, its token, and the server", func(t *testing.T) {
		r := newRig(t, Limits{Beat: 10 * time.Millisecond})
		r.session(id)
		l := r.rawGuest(id)
		near, guest := r.connectGuest(id, l)
		_ = near.Close()
		closes(t, "after its client left", guest)

		_, guest = r.connectGuest(id, l)
		if err := r.tokens.Remove(string(ops.Admin)); err != nil {
			t.Fatal(err)
		}
		closes(t, "after its token was removed", guest)

		token, err := r.tokens.Add(string(ops.Admin), ops.Admin, task.Permission{})
		if err != nil {
			t.Fatal(err)
		}
		r.token[ops.Admin] = token
		_, guest = r.connectGuest(id, l)
		r.shutdown()
		closes(t, "after the server ended", guest)
	})

	t.Run("is bounded and only for admins", func(t *testing.T) {
		r := newRig(t, Limits{Each: 2})
		r.session(id)
		l := r.rawGuest(id)
		for _, scope := range []ops.Scope{ops.Read, ops.Submit} {
			if _, err := r.openTunnel(id, scope); err == nil || !strings.Contains(err.Error(), "403") {
				t.Errorf("tunnel with the scope %s = %v, want status 403", scope, err)
			}
		}
		r.connectGuest(id, l)
		r.connectGuest(id, l)
		if _, err := r.openTunnel(id, ops.Admin); err == nil || !strings.Contains(err.Error(), "429") {
			t.Errorf("third tunnel = %v, want status 429", err)
		}
	})

	t.Run("refuses a session that stops", func(t *testing.T) {
		r := newRig(t, Limits{})
		r.session(id)
		r.rawGuest(id)
		if _, err := r.store.Update(t.Context(), id, func(row *store.Session) (store.Event, error) {
			row.Phase = "stopping"
			return store.Event{Kind: "phase"}, nil
		}); err != nil {
			t.Fatal(err)
		}
		if _, err := r.openTunnel(id, ops.Admin); err == nil || !strings.Contains(err.Error(), "409") {
			t.Errorf("tunnel = %v, want status 409", err)
		}
	})
}

// clientAs returns a client of the API.
func (r *rig) clientAs(scope ops.Scope) *client.Client {
	r.t.Helper()
	c, err := client.New(client.Target{URL: "http://" + r.addr, Token: r.token[scope]})
	if err != nil {
		r.t.Fatal(err)
	}
	return c
}

// TestLogin logs in to a guest from another host.
func TestLogin(t *testing.T) {
	const id = "dddd33334444"
	r := newRig(t, Limits{})
	r.session(id)
	r.vm(id)
	var certified atomic.Int32
	r.tasks.Sessions.Audit = func(_ context.Context, a audit.Record) {
		if a.Type == audit.LoginCertified && a.Actor == "token:admin" && a.Resource == "session:"+id {
			certified.Add(1)
		}
	}
	c := r.clientAs(ops.Admin)
	for range 2 { // a second connection needs no second certificate
		conn, err := c.Dial(t.Context(), id, false)
		if err != nil {
			t.Fatal(err)
		}
		if out, err := conn.Output(t.Context(), "cat", strings.NewReader("hello"), 100); err != nil || string(out) != "hello" {
			t.Errorf("Output = %q, %v, want hello", out, err)
		}
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
	}
	if n := certified.Load(); n != 1 {
		t.Errorf("audit records of certificates = %d, want 1", n)
	}
	// The certificate is for the key that the client sends, and for that alone.
	for _, bad := range []string{"x", "ssh-rsa AAAA", strings.Repeat("x", 2000)} {
		request := ops.LoginRequest{SessionPath: ops.SessionPath{ID: id}}
		request.Body.PublicKey = bad
		for name, h := range map[string]ops.Host{"client": c, "engine": r.engine.As(ops.Caller{Name: "token:admin", Scope: ops.Admin})} {
			if l, err := ops.LoginSession.On(t.Context(), h, request); err == nil || l.Certificate != "" || fail.HintOf(err) == "" && name == "engine" {
				t.Errorf("loginSession of the %s with the key %.20q = %+v, %v, want an error", name, bad, l, err)
			}
		}
	}
	for _, scope := range []ops.Scope{ops.Read, ops.Submit} {
		if _, err := r.clientAs(scope).Dial(t.Context(), id, false); fail.CodeOf(err) != fail.Policy {
			t.Errorf("Dial with the scope %s = %v, want code %s", scope, err, fail.Policy)
		}
	}
	if n := certified.Load(); n != 1 {
		t.Errorf("audit records of certificates = %d, want none for those without the scope", n)
	}

	// The VM is replaced, with another host key and another login key. The same client logs in.
	other := "dddd55556666"
	r.session(other)
	r.vm(other)
	paths := r.tasks.Sessions.Config.Paths
	key, err := os.ReadFile(filepath.Join(paths.SessionDir(other), "ssh_key"))
	if err == nil {
		err = os.WriteFile(filepath.Join(paths.SessionDir(id), "ssh_key"), key, 0o600)
	}
	row, gerr := r.store.Session(t.Context(), other)
	_, uerr := r.store.Update(t.Context(), id, func(s *store.Session) (store.Event, error) {
		s.Status = row.Status
		return store.Event{}, nil
	})
	if err := errors.Join(err, gerr, uerr); err != nil {
		t.Fatal(err)
	}
	conn, err := c.Dial(t.Context(), id, false)
	if err != nil {
		t.Fatalf("Dial of the new VM = %v, want success", err)
	}
	_ = conn.Close()
	if n := certified.Load(); n != 2 {
		t.Errorf("audit records of certificates = %d, want another one", n)
	}
}

// sshGuest makes an SSH server the guest of a session, which knows only the session's key itself.
func (r *rig) sshGuest(id string, pinned func(hostKey string) string) {
	r.t.Helper()
	private, public, err := ssh.NewKey()
	if err != nil {
		r.t.Fatal(err)
	}
	host, err := xssh.ParsePrivateKey(private)
	if err != nil {
		r.t.Fatal(err)
	}
	l, err := (&net.ListenConfig{}).Listen(r.t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { _ = l.Close() })
	authorized := r.guestAt(id, vm.Endpoint{Addr: l.Addr().String(), User: "agent", HostKey: pinned(public)})
	cfg := &xssh.ServerConfig{PublicKeyCallback: func(_ xssh.ConnMetadata, key xssh.PublicKey) (*xssh.Permissions, error) {
		if strings.TrimSpace(string(xssh.MarshalAuthorizedKey(key))) != authorized {
			return nil, errors.New("unknown key")
		}
		return nil, nil
	}}
	cfg.AddHostKey(host)
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				if c, _, _, err := xssh.NewServerConn(conn, cfg); err == nil {
					_ = c.Wait()
				}
			}()
		}
	}()
}

// The client itself checks the guest's host key: no one between the two can take its place.
func TestLoginPinsTheGuest(t *testing.T) {
	const id = "dddd77778888"
	r := newRig(t, Limits{})
	r.session(id)
	r.sshGuest(id, func(string) string {
		_, other, err := ssh.NewKey()
		if err != nil {
			t.Fatal(err)
		}
		return other
	})
	if _, err := r.clientAs(ops.Admin).Dial(t.Context(), id, false); !errors.Is(err, ssh.ErrHostKey) {
		t.Errorf("Dial of a guest with another host key = %v, want %v", err, ssh.ErrHostKey)
	}
}

// A guest that was started before guests accepted certificates refuses them until its next start.
func TestLoginAtAnOldGuest(t *testing.T) {
	const id = "dddd9999aaaa"
	r := newRig(t, Limits{})
	r.session(id)
	r.sshGuest(id, func(hostKey string) string { return hostKey })
	_, err := r.clientAs(ops.Admin).Dial(t.Context(), id, false)
	if fail.CodeOf(err) != fail.Conflict || !strings.Contains(err.Error(), "earlier version") || !strings.Contains(fail.HintOf(err), "agent-sessionizer stop "+id) {
		t.Errorf("Dial = %v (hint %q), want code %s, and a hint to restart the session", err, fail.HintOf(err), fail.Conflict)
	}
}
