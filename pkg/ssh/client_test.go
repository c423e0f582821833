package ssh_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	xssh "golang.org/x/crypto/ssh"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

func TestDialAcceptsOnlyThePinnedKey(t *testing.T) {
	s := serve(t, nil, nil)
	_, other, err := ssh.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	bad := s.target
	bad.HostKey = other
	if _, err := ssh.Dial(t.Context(), bad); !errors.Is(err, ssh.ErrHostKey) || errors.Is(err, ssh.ErrUnreachable) {
		t.Fatalf("Dial with another host key = %v, want %v", err, ssh.ErrHostKey)
	}
	// A pinned key of a type that the server does not have is a mismatch too.
	ecdsaKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	ecdsaPublic, err := xssh.NewPublicKey(ecdsaKey.Public())
	if err != nil {
		t.Fatal(err)
	}
	bad.HostKey = string(xssh.MarshalAuthorizedKey(ecdsaPublic))
	if _, err := ssh.Dial(t.Context(), bad); !errors.Is(err, ssh.ErrHostKey) || errors.Is(err, ssh.ErrUnreachable) {
		t.Fatalf("Dial with a key of another type = %v, want %v", err, ssh.ErrHostKey)
	}
	for _, pin := range []string{"", "nonsense", "ssh-rsa AAAA"} {
		bad.HostKey = pin
		if _, err := ssh.Dial(t.Context(), bad); err == nil || errors.Is(err, ssh.ErrUnreachable) {
			t.Errorf("Dial with pin %q = %v, want an error other than %v", pin, err, ssh.ErrUnreachable)
		}
	}
}

func TestDialSaysWhatIsWrong(t *testing.T) {
	s := serve(t, nil, nil)
	other, _, err := ssh.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	refused := s.target
	refused.Key = other
	if _, err := ssh.Dial(t.Context(), refused); err == nil || !strings.Contains(err.Error(), "rejected the key") || errors.Is(err, ssh.ErrUnreachable) {
		t.Errorf("Dial with an unknown login key = %v, want \"rejected the key\"", err)
	}
	broken := s.target
	broken.Key = []byte("-----BEGIN sentinel-secret")
	if _, err := ssh.Dial(t.Context(), broken); err == nil || strings.Contains(err.Error(), "sentinel") {
		t.Errorf("Dial with a broken login key = %v, want an error without the key", err)
	}
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	nobody := s.target
	nobody.Addr = closed.Addr().String()
	_ = closed.Close()
	if _, err := ssh.Dial(t.Context(), nobody); !errors.Is(err, ssh.ErrUnreachable) {
		t.Errorf("Dial where nothing listens = %v, want %v", err, ssh.ErrUnreachable)
	}
}

// A guest may accept the connection and then stay silent, hang up, or send garbage.
func TestDialSurvivesAGuestThatIsNotSSH(t *testing.T) {
	for name, talk := range map[string]func(net.Conn){
		"silent":   func(c net.Conn) { _, _ = io.Copy(io.Discard, c) },
		"hangs up": func(c net.Conn) { _ = c.Close() },
		"nonsense": func(c net.Conn) {
			for {
				if _, err := io.WriteString(c, "\x1b]0;evil\x07"+strings.Repeat("A", 4096)); err != nil {
					return
				}
			}
		},
		"refuses before it proves its key": func(c net.Conn) {
			why := "ssh: unable to authenticate"
			payload := binary.BigEndian.AppendUint32([]byte{1, 0, 0, 0, 11}, uint32(len(why))) // RFC 4253, 11.1
			payload = append(append(payload, why...), 0, 0, 0, 0)
			padding := 16 - (5+len(payload))%8
			packet := append(binary.BigEndian.AppendUint32(nil, uint32(1+len(payload)+padding)), byte(padding))
			packet = append(append(packet, payload...), make([]byte, padding)...)
			_, _ = c.Write(append([]byte("SSH-2.0-x\r\n"), packet...))
			_, _ = io.Copy(io.Discard, c)
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := serve(t, nil, nil)
			ln, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer ln.Close()
			go func() {
				c, err := ln.Accept()
				if err == nil {
					talk(c)
					_ = c.Close()
				}
			}()
			s.target.Addr = ln.Addr().String()
			ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
			defer cancel()
			if _, err := ssh.Dial(ctx, s.target); !errors.Is(err, ssh.ErrUnreachable) || strings.ContainsRune(err.Error(), 0x1b) || strings.Contains(err.Error(), "rejected the key") {
				t.Fatalf("Dial of a guest that is not SSH = %q, want %v without escapes and without a rejected key", err, ssh.ErrUnreachable)
			}
		})
	}
}

func TestDialEndsWithItsContext(t *testing.T) {
	s := serve(t, nil, nil)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	s.target.Addr = ln.Addr().String()
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		if c, err := ln.Accept(); err == nil {
			cancel()
			_, _ = io.Copy(io.Discard, c)
		}
	}()
	if _, err := ssh.Dial(ctx, s.target); !errors.Is(err, context.Canceled) {
		t.Fatalf("cancelled Dial = %v, want %v", err, context.Canceled)
	}
}

// A dial that is cancelled while a relay is silent does not fall back to the guest.
func TestDialThroughARelayEndsWithItsContext(t *testing.T) {
	s := serve(t, nil, nil)
	dir := testenv.ShortDir(t)
	ln, err := ssh.ListenRelay(filepath.Join(dir, "sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		if c, err := ln.Accept(); err == nil {
			cancel()
			_, _ = io.Copy(io.Discard, c)
		}
	}()
	target := s.target
	target.Relay = ln.Addr().String()
	if c, err := ssh.Dial(ctx, target); c != nil || err == nil || s.connections() != 0 {
		t.Errorf("cancelled Dial = %v, %v, %d connections to the guest, want nil, an error, 0", c, err, s.connections())
	}
}

// A guest that has just booted is dialled until it answers, or until waiting
// returns an error.
func TestDialBooted(t *testing.T) {
	s := serve(t, nil, nil)
	silent := s.target
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	silent.Addr = closed.Addr().String()
	_ = closed.Close()
	gone := errors.New("the VM is gone")
	tries := 0
	if c, err := ssh.DialBooted(t.Context(), silent, func() error {
		if tries++; tries == 3 {
			return gone
		}
		return nil
	}); c != nil || !errors.Is(err, gone) || tries != 3 {
		t.Errorf("DialBooted = %v, %v after %d tries, want nil, %v, 3", c, err, tries, gone)
	}
	ctx, cancel := context.WithCancel(t.Context())
	if c, err := ssh.DialBooted(ctx, silent, func() error { cancel(); return nil }); c != nil || err == nil {
		t.Errorf("cancelled DialBooted = %v, %v, want nil, an error", c, err)
	}
	refused := s.target
	if refused.Key, _, err = ssh.NewKey(); err != nil {
		t.Fatal(err)
	}
	if _, err := ssh.DialBooted(t.Context(), refused, func() error { t.Error("DialBooted waits for a guest that refuses, want it to return"); return nil }); err == nil {
		t.Error("DialBooted with a refused key = nil, want an error")
	}
	c, err := ssh.DialBooted(t.Context(), s.target, func() error { t.Error("DialBooted waits for a guest that answers, want it to return"); return nil })
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
}

func TestCloseAndDone(t *testing.T) {
	s := serve(t, nil, nil)
	c := s.dial(t)
	select {
	case <-c.Done():
		t.Fatal("Done is closed before anything happened, want it open")
	default:
	}
	s.cut()
	<-c.Done()
	if err := c.Run(t.Context(), "true", ssh.IO{}); !errors.Is(err, ssh.ErrUnreachable) {
		t.Errorf("Run on a lost connection = %v, want %v", err, ssh.ErrUnreachable)
	}
	if err := errors.Join(c.Close(), c.Close()); err != nil {
		t.Error(err)
	}
	if err := c.Run(t.Context(), "true", ssh.IO{}); !errors.Is(err, ssh.ErrUnreachable) {
		t.Errorf("Run on a closed client = %v, want %v", err, ssh.ErrUnreachable)
	}
}

func TestKeepAliveClosesWhenThePeerIsGone(t *testing.T) {
	s := serve(t, nil, nil)
	// This proxy can stop forwarding without closing connections, like a frozen VM.
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	freeze, carried, guest := make(chan struct{}), make(chan struct{}, 100), s.target.Addr
	go func() {
		front, err := ln.Accept()
		if err != nil {
			return
		}
		defer front.Close()
		back, err := net.Dial("tcp", guest)
		if err != nil {
			return
		}
		defer back.Close()
		go func() { _, _ = io.Copy(back, front) }()
		buf := make([]byte, 4096)
		for {
			n, err := back.Read(buf)
			if err != nil {
				return
			}
			select {
			case <-freeze:
				continue
			default:
			}
			if _, err := front.Write(buf[:n]); err != nil {
				return
			}
			select {
			case carried <- struct{}{}:
			default:
			}
		}
	}()
	s.target.Addr = ln.Addr().String()
	c := s.dial(t)
	for len(carried) > 0 { // drain the handshake
		<-carried
	}
	patient, cancel := context.WithCancel(t.Context())
	c.KeepAlive(patient, 10*time.Millisecond, time.Hour)
	for range 5 {
		select {
		case <-c.Done():
			t.Fatal("client is closed while the peer answered, want it open")
		case <-carried:
		case <-time.After(2 * time.Minute):
			t.Fatal("keep-alive request after 2 minutes = none, want one")
		}
	}
	cancel()
	close(freeze)
	c.KeepAlive(t.Context(), 10*time.Millisecond, 300*time.Millisecond)
	select {
	case <-c.Done():
	case <-time.After(2 * time.Minute):
		t.Fatal("client of a frozen peer is open after 2 minutes, want it closed")
	}
}
