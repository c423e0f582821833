package session

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// hostileSSH is what a user's own configuration may contain for all hosts.
const hostileSSH = `Host *
  SendEnv SECRET_* GITHUB_TOKEN
  SetEnv SECRET=1
  ForwardAgent yes
  ForwardX11 yes
  ForwardX11Trusted yes
  Tunnel yes
  LocalForward 9001 localhost:1
  RemoteForward 9002 localhost:2
  DynamicForward 9003
  GatewayPorts yes
  ProxyCommand touch /tmp/never
  ProxyJump elsewhere
  ControlMaster auto
  ControlPath /tmp/never-%h
  ControlPersist 1h
  PermitLocalCommand yes
  LocalCommand touch /tmp/never
  RemoteCommand echo never
  IdentityAgent /tmp/never.sock
  IdentitiesOnly no
  AddKeysToAgent yes
  PKCS11Provider /tmp/never.so
  PasswordAuthentication yes
  KbdInteractiveAuthentication yes
  HostbasedAuthentication yes
  GSSAPIAuthentication yes
  GSSAPIDelegateCredentials yes
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  GlobalKnownHostsFile /tmp/never
  KnownHostsCommand /bin/echo never
  NoHostAuthenticationForLocalhost yes
  HostKeyAlias never
  UpdateHostKeys yes
  VerifyHostKeyDNS yes
  CanonicalizeHostname always
  EnableEscapeCommandline yes
  ForkAfterAuthentication yes
  SessionType none
  StdinNull yes
  User never
  Port 1
  HostName elsewhere.invalid
`

// Settings that the user's configuration turns on for all hosts do not apply to a
// guest.
func TestSSHConfigTurnsEverythingOff(t *testing.T) {
	dir := t.TempDir()
	h := SSHHost{
		Host: "agent-o-r-012345", Hostname: "127.0.0.1", Port: "2222", User: "agent",
		IdentityFile: "/keys/session key", KnownHostsFile: "/keys/known hosts",
	}
	write := func(name, text string) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	settings := func(file string) map[string][]string {
		t.Helper()
		out, err := exec.CommandContext(t.Context(), "ssh", "-G", "-F", file, h.Host).CombinedOutput()
		if err != nil {
			t.Fatalf("ssh -G (is openssh-client installed?): %v\n%s", err, out)
		}
		all := map[string][]string{}
		for line := range strings.Lines(string(out)) {
			name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
			all[name] = append(all[name], value)
		}
		return all
	}
	own := write("agents", h.String())
	alone := settings(own)
	want := settings(write("included", "Include "+own+"\n"+hostileSSH+"Match all\nInclude "+own+"\n"))
	for name, values := range want {
		if !slices.Equal(values, alone[name]) {
			t.Errorf("%s with the user's configuration = %q, want %q as without", name, values, alone[name])
		}
	}
	for _, name := range []string{"sendenv", "localforward", "remoteforward", "dynamicforward", "proxycommand", "proxyjump", "localcommand", "remotecommand", "pkcs11provider", "controlpath"} {
		if v := alone[name]; len(v) > 0 && v[0] != "none" {
			t.Errorf("%s = %q, want none", name, v)
		}
	}
	for name, value := range map[string]string{
		"hostname": "127.0.0.1", "port": "2222", "user": "agent", "hostkeyalias": h.Host, "userknownhostsfile": `"/keys/known hosts"`, "stricthostkeychecking": "true",
		"forwardagent": "no", "forwardx11": "no", "tunnel": "false", "controlmaster": "false", "permitlocalcommand": "no", "identityagent": "none",
		"identitiesonly": "yes", "passwordauthentication": "no", "nohostauthenticationforlocalhost": "no", "clearallforwardings": "yes", "sessiontype": "default",
	} {
		if v := alone[name]; len(v) != 1 || strings.Trim(v[0], `"`) != strings.Trim(value, `"`) {
			t.Errorf("%s = %q, want %q", name, v, value)
		}
	}
	// With the block only at the top, OpenSSH adds the user's variables and nothing
	// else.
	top := settings(write("top", "Include "+own+"\n"+hostileSSH))
	for name, values := range top {
		if name != "sendenv" && !slices.Equal(values, alone[name]) {
			t.Errorf("%s, included on top of the user's configuration, = %q, want %q as without", name, values, alone[name])
		}
	}
	h.Forwards = true
	if got := settings(write("forwards", "Include "+write("agents-forwards", h.String())+"\n"+hostileSSH)); len(got["remoteforward"]) != 1 || got["clearallforwardings"][0] != "no" {
		t.Errorf("with forwards: remoteforward = %q, clearallforwardings = %q, want 1, no", got["remoteforward"], got["clearallforwardings"])
	}
}
