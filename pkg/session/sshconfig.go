package session

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"path/filepath"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
)

// SSHHost is how an OpenSSH client logs in to a running session: with the session's
// own key, trusting only its pinned host key.
type SSHHost struct {
	Host           string `json:"host"` // the session's name
	Hostname       string `json:"hostname"`
	Port           string `json:"port"`
	User           string `json:"user"`
	IdentityFile   string `json:"identity_file"`
	HostKey        string `json:"host_key"`
	KnownHostsFile string `json:"known_hosts_file"` // names the host as Host

	Forwards bool   `json:"-"` // whether forwards from the user's configuration and command line are allowed
	Proxy    string `json:"-"` // command that connects to Hostname and Port; "" for none
}

// SSHForEditors ends the name under which OpenSSH's configuration knows a session for editors, with
// forwarded ports.
const SSHForEditors = "-editor"

// ProxyCommand is the hidden command that connects OpenSSH to a session.
const ProxyCommand = "ssh-proxy"

// writeSSHConfig writes the file in the session's directory that OpenSSH's configuration includes after
// "ssh-config --install". self is the path of this program. Through it, OpenSSH finds a VM that was
// started again, at another port.
func (c Connections) writeSSHConfig(s Session, self string) error {
	h, err := c.SSHConfig(s)
	if err != nil {
		return err
	}
	h.Proxy = strings.ReplaceAll(ssh.Quote(self, ProxyCommand, s.Name), "%", "%%")
	safe := h.block(s.Name)
	h.Forwards = true
	return writeFile(c.sshConfigFile(s.ID), []byte(safe+h.block(s.Name+SSHForEditors)))
}

func (c Connections) sshConfigFile(id string) string {
	return filepath.Join(c.Paths.SessionDir(id), "ssh_config")
}

// SSHConfigFiles returns the pattern that matches the files that OpenSSH's configuration includes.
func (c Connections) SSHConfigFiles() string { return c.sshConfigFile("*") }

// WriteSSHConfigs writes the files of all sessions that have a VM, which their keepers do only when they
// start it.
func (m *Manager) WriteSSHConfigs(ctx context.Context) error {
	rows, err := m.Store.Sessions(ctx, false)
	if err != nil {
		return err
	}
	c := Connections{Paths: m.Config.Paths}
	for _, row := range rows {
		s, err := read(row, nil)
		if err != nil {
			return err
		}
		if s.hasVM() != nil {
			continue
		}
		if err := c.writeSSHConfig(s, m.Self); err != nil {
			return err
		}
	}
	return nil
}

// SSHConfig returns the session's SSHHost and writes its file of known hosts.
func (c Connections) SSHConfig(s Session) (SSHHost, error) {
	host, port, err := net.SplitHostPort(s.Status.Endpoint.Addr)
	if err != nil {
		return SSHHost{}, fail.New(fail.Conflict, "session %s has no running VM", s.Name).WithHint("agent-sessionizer start %s", s.Name)
	}
	h := SSHHost{
		Host: s.Name, Hostname: host, Port: port, User: s.Status.Endpoint.User, IdentityFile: c.keyFile(s.ID),
		HostKey: s.Status.Endpoint.HostKey, KnownHostsFile: filepath.Join(c.Paths.SessionDir(s.ID), "known_hosts"),
	}
	return h, writeFile(h.KnownHostsFile, []byte(h.Host+" "+h.HostKey+"\n"))
}

// String returns the block for an OpenSSH configuration. OpenSSH uses the first value
// of most settings, so the values of a later "Host *" do not apply to the guest.
// SendEnv values add up instead; the block removes them again where it is also last.
// The user's forwards are cleared unless Forwards is set.
func (h SSHHost) String() string { return h.block(h.Host) }

func (h SSHHost) block(name string) string {
	return fmt.Sprintf(`Host %s
  HostName %s
  Port %s
  User %s
  IdentityFile "%s"
  HostKeyAlias %s
  UserKnownHostsFile "%s"
%s
`, name, h.Hostname, h.Port, h.User, h.IdentityFile, h.Host, h.KnownHostsFile, h.settings())
}

// settings returns the settings that are the same for every guest.
func (h SSHHost) settings() string {
	clearForwards := "yes"
	if h.Forwards {
		clearForwards = "no"
	}
	var b strings.Builder
	for _, setting := range []string{
		"IgnoreUnknown *", // older versions of OpenSSH lack some of these
		"GlobalKnownHostsFile /dev/null", "KnownHostsCommand none", "StrictHostKeyChecking yes", "NoHostAuthenticationForLocalhost no",
		"VerifyHostKeyDNS no", "UpdateHostKeys no", "CheckHostIP no", "CanonicalizeHostname no",
		"IdentitiesOnly yes", "IdentityAgent none", "AddKeysToAgent no", "PKCS11Provider none", "PubkeyAuthentication yes", "PasswordAuthentication no",
		"KbdInteractiveAuthentication no", "HostbasedAuthentication no", "GSSAPIAuthentication no", "GSSAPIDelegateCredentials no",
		"ForwardAgent no", "ForwardX11 no", "ForwardX11Trusted no", "Tunnel no", "ClearAllForwardings " + clearForwards, "GatewayPorts no", "PermitRemoteOpen none",
		"ProxyCommand " + cmp.Or(h.Proxy, "none"), "ProxyJump none", "ControlMaster no", "ControlPath none", "ControlPersist no",
		"PermitLocalCommand no", "LocalCommand none", "RemoteCommand none", "SessionType default", "ForkAfterAuthentication no", "StdinNull no",
		"EnableEscapeCommandline no", "SetEnv LC_AGENT=1", "SendEnv -*",
	} {
		b.WriteString("  " + setting + "\n")
	}
	return b.String()
}
