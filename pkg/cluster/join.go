package cluster

import (
	"context"
	"crypto/ecdsa"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"filippo.io/age"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lazyregexp"
)

// Token invites one host into a cluster. A host that has it can join once, until it expires.
type Token struct {
	Addrs       []string `json:"a"` // HOST:PORT of cores
	Fingerprint string   `json:"f"` // of the cluster's authority
	Seed        string   `json:"s"` // private key for the one login
	Role        Role     `json:"r"` // that the host will have
}

// tokenPrefix tells a token from other text, and its version.
const tokenPrefix = "asz1."

// String returns the token as text without spaces.
func (t Token) String() string {
	text, err := json.Marshal(t)
	if err != nil {
		panic(err) // strings
	}
	return tokenPrefix + base64.RawURLEncoding.EncodeToString(text)
}

// ParseToken reads what String returned.
func ParseToken(text string) (t Token, err error) {
	const hint = "on a host of the cluster: agent-sessionizer cluster token"
	rest, ok := strings.CutPrefix(strings.TrimSpace(text), tokenPrefix)
	if ok {
		var plain []byte
		if plain, err = base64.RawURLEncoding.DecodeString(rest); err == nil {
			err = json.Unmarshal(plain, &t)
		}
	}
	if !ok || err != nil || len(t.Addrs) == 0 || t.Fingerprint == "" || t.Seed == "" {
		return t, fail.New(fail.Usage, "the text is not a whole token of a cluster").WithHint(hint)
	}
	return t, nil
}

// NewToken makes a token and the invitation that it stands for.
func NewToken(addrs []string, authority []byte, role Role, valid time.Duration) (Token, Invitation, error) {
	if valid <= 0 || valid > maxInvitation {
		return Token{}, Invitation{}, fail.New(fail.Usage, "the token's validity must be at most %v", maxInvitation)
	}
	f, err := Fingerprint(authority)
	if err != nil {
		return Token{}, Invitation{}, err
	}
	key, err := nkeys.CreateUser()
	if err != nil {
		return Token{}, Invitation{}, err
	}
	seed, err := key.Seed()
	if err != nil {
		return Token{}, Invitation{}, err
	}
	public, err := key.PublicKey()
	return Token{addrs, f, string(seed), role}, Invitation{Nkey: public, Role: role, Expires: time.Now().Add(valid)}, err
}

// Applicant is a host that wants to join. A core has addresses at which it listens.
type Applicant struct {
	Name  string `json:"name"`
	Addr  string `json:"addr,omitempty"`  // HOST:PORT, for hosts
	Route string `json:"route,omitempty"` // HOST:PORT, for the other cores
}

// check returns an error unless the applicant can have that role.
func (a Applicant) check(r Role) error {
	if err := CheckName(a.Name); err != nil {
		return err
	}
	if !r.Allows(CoreOf) {
		if a.Addr != "" || a.Route != "" {
			return fail.New(fail.Usage, "a %s listens on no address", r).WithHint("agent-sessionizer serve --join - # without --cluster-address")
		}
		return nil
	}
	for _, addr := range []string{a.Addr, a.Route} {
		if _, _, err := address(addr); err != nil {
			return fail.New(fail.Usage, "a core needs the address at which other hosts reach it: %w", err).
				WithHint("agent-sessionizer serve --join - --cluster-address 192.0.2.1:7422")
		}
	}
	return nil
}

// application is what an invited host sends.
type application struct {
	Applicant

	Nkey      string `json:"nkey"`
	Recipient string `json:"recipient"`
	Key       []byte `json:"key"` // PKIX, DER
}

// signed is a message with the signature of a host's nkey, which shows that the host has that key.
type signed struct {
	Text      []byte `json:"text"`
	Signature []byte `json:"signature"`
}

// sign encodes and signs a message.
func (k *Keys) sign(message any) ([]byte, error) {
	var s signed
	var err error
	if s.Text, err = json.Marshal(message); err != nil {
		return nil, err
	}
	if s.Signature, err = k.nkey.Sign(s.Text); err != nil {
		return nil, err
	}
	return json.Marshal(s)
}

// verify returns an error unless the nkey signed the message.
func (s signed) verify(nkey string) error {
	public, err := nkeys.FromPublicKey(nkey)
	if err == nil {
		err = public.Verify(s.Text, s.Signature)
	}
	return err
}

// Admission is the answer: what the host needs as a member.
type Admission struct {
	Cluster     string   `json:"cluster"`
	Role        Role     `json:"role"`
	Certificate string   `json:"certificate"` // PEM, of the host
	Authority   string   `json:"authority"`   // PEM
	Addrs       []string `json:"addrs"`       // of the cores

	// For a core: the private key of the authority, encrypted for it, and those who may log in.
	Signing []byte       `json:"signing,omitempty"`
	Members []Membership `json:"members,omitempty"`

	External bool `json:"external,omitempty"` // others hold the streams
}

// reply is an Admission, or why there is none.
type reply struct {
	*Admission
	Code  string `json:"code,omitempty"`
	Error string `json:"error,omitempty"`
	Hint  string `json:"hint,omitempty"`
}

// hostName is the form of a host's name in the cluster: a part of a subject of NATS.
var hostName = lazyregexp.New(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)

// CheckName returns an error unless name can be that of a host.
func CheckName(name string) error {
	if !hostName.MatchString(name) {
		return fail.New(fail.Usage, "the host's name %q must have 1 to 63 lower-case letters, digits and hyphens", name)
	}
	return nil
}

// Join asks a core to admit this host. It may be repeated with the same keys, for example if the
// answer was lost.
func (k *Keys) Join(ctx context.Context, t Token, is Applicant) (Admission, error) {
	if err := is.check(t.Role); err != nil {
		return Admission{}, err
	}
	request, err := k.apply(is)
	if err != nil {
		return Admission{}, err
	}
	key, err := nkeys.FromSeed([]byte(t.Seed))
	if err != nil {
		return Admission{}, fail.New(fail.Usage, "the token is damaged: %w", err)
	}
	public, err := key.PublicKey()
	if err != nil {
		return Admission{}, err
	}
	opts, err := login(key)
	if err != nil {
		return Admission{}, err
	}
	nc, err := nats.Connect(strings.Join(urls(t.Addrs), ","), append(opts, nats.Secure(pinned(t.Fingerprint, func(Identity) error { return nil })), nats.NoReconnect(), nats.Timeout(tryTimeout))...)
	if err != nil {
		return Admission{}, fail.New(fail.Host, "log in to the cluster at %s with the token: %w", strings.Join(t.Addrs, ", "), err).
			WithHint("has the token expired or been used? On a host of the cluster: agent-sessionizer cluster token")
	}
	defer nc.Close()
	m, err := nc.RequestWithContext(ctx, join+public, request)
	if err != nil {
		return Admission{}, fail.New(fail.Host, "join the cluster: %w", err)
	}
	var r reply
	if err := json.Unmarshal(m.Data, &r); err != nil {
		return Admission{}, fmt.Errorf("join the cluster: read the answer: %w", err)
	}
	if r.Admission == nil {
		return Admission{}, fail.New(fail.ParseCode(r.Code), "join the cluster: %s", r.Error).WithHint("%s", r.Hint)
	}
	if f, err := Fingerprint([]byte(r.Authority)); err != nil || f != t.Fingerprint { // others may answer, too, if the cluster uses their NATS servers
		return Admission{}, errors.Join(fail.New(fail.Policy, "join the cluster: the answer is not of the token's cluster"), err)
	}
	return *r.Admission, nil
}

// apply returns the message of a host that asks to be admitted.
func (k *Keys) apply(is Applicant) ([]byte, error) {
	i, err := k.Identity(is.Name, "")
	if err != nil {
		return nil, err
	}
	a := application{Applicant: is, Nkey: i.Nkey, Recipient: i.Recipient}
	if a.Key, err = x509.MarshalPKIXPublicKey(i.Key); err != nil {
		return nil, err
	}
	return k.sign(a)
}

// urls returns the addresses of cores as the client of NATS takes them.
func urls(addrs []string) []string {
	all := make([]string, len(addrs))
	for i, a := range addrs {
		all[i] = "tls://" + a
	}
	return all
}

// pinned accepts servers whose certificate is signed by the authority with that fingerprint, and
// that are cores. trust decides about a core.
func pinned(fingerprint string, trust func(Identity) error) *tls.Config {
	return &tls.Config{
		MinVersion:         tls.VersionTLS13,
		InsecureSkipVerify: true, //nolint:gosec // VerifyConnection checks more
		VerifyConnection: func(s tls.ConnectionState) error {
			for _, root := range s.PeerCertificates {
				if sum := sha256.Sum256(root.Raw); hex.EncodeToString(sum[:]) == fingerprint {
					i, err := identify(s.PeerCertificates[0], root)
					switch {
					case err != nil:
						return err
					case !i.Role.Allows(CoreOf):
						return fail.New(fail.Policy, "host %s is not a core of the cluster", i.Name)
					}
					return trust(i)
				}
			}
			return fail.New(fail.Policy, "the server does not belong to the token's cluster")
		},
	}
}

// Admitter admits invited hosts. It runs on cores.
type Admitter struct {
	Cluster   string
	Members   *Members
	Authority *Authority
	Addrs     func(context.Context) ([]string, error) // of the cores
	External  bool                                    // others hold the streams
}

// Serve answers those who want to join, until ctx ends. One of the cores answers each.
func (a Admitter) Serve(ctx context.Context, nc *nats.Conn) error {
	sub, err := nc.QueueSubscribe(join+"*", "admit", func(m *nats.Msg) {
		ctx, cancel := context.WithTimeout(ctx, 5*tryTimeout)
		defer cancel()
		admission, err := a.admit(ctx, strings.TrimPrefix(m.Subject, join), m.Data)
		r := reply{Admission: admission}
		if err != nil {
			r.Code, r.Error, r.Hint = fail.CodeOf(err).String(), err.Error(), fail.HintOf(err)
		}
		if text, err := json.Marshal(r); err == nil {
			_ = answerInbox(m, text) // a lost answer is asked for again
		}
	})
	if err != nil {
		return fmt.Errorf("admit hosts to the cluster: %w", err)
	}
	<-ctx.Done()
	return sub.Unsubscribe()
}

// admit admits the host that applies with a token.
func (a Admitter) admit(ctx context.Context, token string, text []byte) (*Admission, error) {
	i, applicant, err := parseApplication(text)
	if err != nil {
		return nil, err
	}
	invitation, err := a.Members.use(ctx, token, i.Nkey, time.Now())
	if err != nil {
		return nil, err
	}
	if err := applicant.check(invitation.Role); err != nil {
		return nil, err
	}
	i.Role = invitation.Role
	certificate, err := a.Authority.Sign(i)
	if err != nil {
		return nil, err
	}
	is := Membership{Name: i.Name, Role: i.Role, Nkey: i.Nkey, Certificate: string(certificate), Addr: applicant.Addr, Route: applicant.Route, Joined: time.Now().UTC()}
	if err := a.Members.Add(ctx, is); errors.Is(err, ErrConflict) {
		was, gerr := a.Members.Get(ctx, i.Name)
		switch {
		case gerr != nil:
			return nil, gerr
		case was.Nkey != i.Nkey || !was.Removed.IsZero():
			return nil, fail.New(fail.Conflict, "the cluster has or had a host with the name %s", i.Name).
				WithHint("agent-sessionizer serve --name ANOTHER --join - # and paste the same token")
		}
		if was.Addr != applicant.Addr || was.Route != applicant.Route {
			return nil, fail.New(fail.Conflict, "the cluster knows the host %s at the address %s", i.Name, was.Addr).
				WithHint("agent-sessionizer serve --join - --cluster-address %s # and paste the same token", was.Addr)
		}
		is = was // its first answer was lost
	} else if err != nil {
		return nil, err
	}
	addrs, err := a.Addrs(ctx)
	if err != nil {
		return nil, err
	}
	answer := &Admission{Cluster: a.Cluster, Role: is.Role, Certificate: is.Certificate, Authority: string(a.Authority.Certificate()), Addrs: addrs, External: a.External}
	if !is.Role.Allows(CoreOf) {
		return answer, nil
	}
	signing, err := a.Authority.Encode()
	if err != nil {
		return nil, err
	}
	if answer.Signing, err = encrypt(i.Recipient, signing); err != nil {
		return nil, err
	}
	answer.Members, err = a.Members.All(ctx)
	return answer, err
}

// parseApplication checks what a stranger sent.
func parseApplication(text []byte) (Identity, Applicant, error) {
	var s signed
	var a application
	err := json.Unmarshal(text, &s)
	if err == nil {
		err = json.Unmarshal(s.Text, &a)
	}
	if err != nil {
		return Identity{}, Applicant{}, fail.New(fail.Usage, "the application is invalid: %w", err)
	}
	if err := CheckName(a.Name); err != nil {
		return Identity{}, Applicant{}, err
	}
	if !nkeys.IsValidPublicUserKey(a.Nkey) {
		return Identity{}, Applicant{}, fail.New(fail.Usage, "the application has no valid public key")
	}
	if err := s.verify(a.Nkey); err != nil {
		return Identity{}, Applicant{}, fail.New(fail.Policy, "the application is not signed with its key: %w", err)
	}
	if _, err := age.ParseX25519Recipient(a.Recipient); err != nil {
		return Identity{}, Applicant{}, fail.New(fail.Usage, "the application has no valid recipient: %w", err)
	}
	key, err := x509.ParsePKIXPublicKey(a.Key)
	is, ok := key.(*ecdsa.PublicKey)
	if err != nil || !ok {
		return Identity{}, Applicant{}, fail.New(fail.Usage, "the application has no valid key for TLS")
	}
	return Identity{Name: a.Name, Nkey: a.Nkey, Recipient: a.Recipient, Key: is}, a.Applicant, nil
}
