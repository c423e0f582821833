package cluster

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net/url"
	"slices"
	"strings"
	"time"

	"filippo.io/age"
	"github.com/nats-io/nkeys"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// Role is what a host may do in its cluster. Each role includes the previous ones.
type Role string

// The roles.
const (
	Worker Role = "worker" // runs tasks
	Member Role = "member" // also submits tasks, and opens sessions on other hosts
	CoreOf Role = "core"   // also holds the streams, and admits and removes hosts
)

// Roles returns all roles, the least powerful first.
func Roles() []Role { return []Role{Worker, Member, CoreOf} }

// Allows reports whether a host with role r may do what need may do.
func (r Role) Allows(need Role) bool {
	return slices.Contains(Roles(), r) && slices.Index(Roles(), r) >= slices.Index(Roles(), need)
}

// certTime is the validity of certificates. What ends the trust in a host is its removal.
const certTime = 10 * 365 * 24 * time.Hour

// Authority signs the certificates of a cluster's hosts, and the list of its members. Without its private
// key, which only cores have, it can check them.
type Authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey // may be nil
}

// ReadAuthority reads an authority's certificate.
func ReadAuthority(certificate []byte) (*Authority, error) {
	cert, err := decodeCertificate(certificate)
	if err != nil {
		return nil, fmt.Errorf("read the cluster's authority: %w", err)
	}
	return &Authority{cert: cert}, nil
}

// NewAuthority makes the authority of a new cluster.
func NewAuthority(cluster string) (*Authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber: serial(), Subject: pkix.Name{CommonName: "agent-sessionizer cluster " + cluster},
		NotBefore: time.Unix(0, 0), NotAfter: time.Now().Add(2 * certTime), // clocks of hosts differ
		IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return nil, err
	}
	cert, err := x509.ParseCertificate(der)
	return &Authority{cert, key}, err
}

func serial() *big.Int {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	return new(big.Int).SetBytes(b[:])
}

// Encode returns the authority as PEM, with its private key.
func (a *Authority) Encode() ([]byte, error) {
	key, err := x509.MarshalECPrivateKey(a.key)
	if err != nil {
		return nil, err
	}
	return append(a.Certificate(), pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: key})...), nil
}

// DecodeAuthority reads what Encode wrote.
func DecodeAuthority(text []byte) (*Authority, error) {
	cert, err := decodeCertificate(text)
	if err != nil {
		return nil, err
	}
	_, rest := pem.Decode(text)
	block, _ := pem.Decode(rest)
	if block == nil {
		return nil, errors.New("read the cluster's authority: no private key")
	}
	key, err := x509.ParseECPrivateKey(block.Bytes)
	return &Authority{cert, key}, err
}

// Certificate returns the authority's certificate as PEM.
func (a *Authority) Certificate() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.cert.Raw})
}

func decodeCertificate(text []byte) (*x509.Certificate, error) {
	block, _ := pem.Decode(text)
	if block == nil || block.Type != "CERTIFICATE" {
		return nil, errors.New("no certificate in PEM")
	}
	return x509.ParseCertificate(block.Bytes)
}

// Fingerprint identifies the certificate of an authority: the SHA-256 of its DER, in hex.
func Fingerprint(certificate []byte) (string, error) {
	cert, err := decodeCertificate(certificate)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(cert.Raw)
	return hex.EncodeToString(sum[:]), nil
}

// Keys are the private keys of a host: with one it logs in to NATS, with one it speaks TLS, and with
// one it opens what was sealed for it.
type Keys struct {
	nkey nkeys.KeyPair
	tls  *ecdsa.PrivateKey
	age  *age.X25519Identity
}

// NewKeys makes the keys of a new host.
func NewKeys() (*Keys, error) {
	user, err := nkeys.CreateUser()
	if err != nil {
		return nil, err
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	id, err := age.GenerateX25519Identity()
	return &Keys{user, key, id}, err
}

// derive returns a secret of the host for a purpose.
func (k *Keys) derive(purpose string) ([]byte, error) {
	seed, err := k.nkey.Seed()
	if err != nil {
		return nil, err
	}
	h := hmac.New(sha256.New, seed)
	h.Write([]byte("agent-sessionizer " + purpose))
	return h.Sum(nil), nil
}

// Identity is who a host is in its cluster. The authority vouches for all of it.
type Identity struct {
	Name      string
	Role      Role
	Nkey      string // public
	Recipient string // of age, for what is sealed for the host
	Key       *ecdsa.PublicKey
	Serial    string // of the certificate; "" before there is one
}

// Identity returns what others may know of the keys of a host.
func (k *Keys) Identity(name string, role Role) (Identity, error) {
	public, err := k.nkey.PublicKey()
	return Identity{Name: name, Role: role, Nkey: public, Recipient: k.age.Recipient().String(), Key: &k.tls.PublicKey}, err
}

// scheme is that of the URIs in a host's certificate.
const scheme = "agent-sessionizer"

// uris returns the parts of an identity that a certificate has no field for.
func (i Identity) uris() []*url.URL {
	return []*url.URL{
		{Scheme: scheme, Host: "host", Path: "/" + i.Name},
		{Scheme: scheme, Host: "role", Path: "/" + string(i.Role)},
		{Scheme: scheme, Host: "nkey", Path: "/" + i.Nkey},
		{Scheme: scheme, Host: "age", Path: "/" + i.Recipient},
	}
}

// Sign returns the certificate of a host as PEM.
func (a *Authority) Sign(i Identity) ([]byte, error) {
	template := &x509.Certificate{
		SerialNumber: serial(), Subject: pkix.Name{CommonName: i.Name}, URIs: i.uris(),
		NotBefore: time.Unix(0, 0), NotAfter: time.Now().Add(certTime),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, i.Key, a.key)
	if err != nil {
		return nil, fmt.Errorf("sign the certificate of host %s: %w", i.Name, err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), nil
}

// identify returns whom a certificate is about, if the authority signed it.
func identify(cert, authority *x509.Certificate) (Identity, error) {
	roots := x509.NewCertPool()
	roots.AddCert(authority)
	if _, err := cert.Verify(x509.VerifyOptions{Roots: roots, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}}); err != nil {
		return Identity{}, fail.New(fail.Policy, "the certificate is not one of this cluster: %w", err)
	}
	key, ok := cert.PublicKey.(*ecdsa.PublicKey)
	if !ok {
		return Identity{}, fail.New(fail.Policy, "the certificate has another kind of key")
	}
	i := Identity{Key: key, Serial: cert.SerialNumber.Text(16)}
	for _, u := range cert.URIs {
		value := strings.TrimPrefix(u.Path, "/")
		switch {
		case u.Scheme != scheme:
		case u.Host == "host":
			i.Name = value
		case u.Host == "role":
			i.Role = Role(value)
		case u.Host == "nkey":
			i.Nkey = value
		case u.Host == "age":
			i.Recipient = value
		}
	}
	if i.Name == "" || !slices.Contains(Roles(), i.Role) {
		return Identity{}, fail.New(fail.Policy, "the certificate is not one of a host")
	}
	return i, nil
}

// TLS returns the settings for connections to and from other hosts of the cluster. Both sides have
// certificates of its authority. allow decides about the other side, and must refuse hosts that
// were removed.
func (k *Keys) TLS(certificate, authority []byte, allow func(Identity) error) (*tls.Config, error) {
	own, err := decodeCertificate(certificate)
	if err != nil {
		return nil, err
	}
	root, err := decodeCertificate(authority)
	if err != nil {
		return nil, err
	}
	verify := func(s tls.ConnectionState) error {
		if len(s.PeerCertificates) == 0 {
			return fail.New(fail.Policy, "the other host has no certificate")
		}
		i, err := identify(s.PeerCertificates[0], root)
		if err != nil {
			return err
		}
		return allow(i)
	}
	return &tls.Config{
		MinVersion:   tls.VersionTLS13,
		Certificates: []tls.Certificate{{Certificate: [][]byte{own.Raw}, PrivateKey: k.tls}},
		ClientAuth:   tls.RequireAnyClientCert,
		// Hosts have names in the cluster, not in DNS, so VerifyConnection checks the certificate.
		InsecureSkipVerify: true, //nolint:gosec // see above
		VerifyConnection:   verify,
	}, nil
}

// forHosts returns the settings for connections from hosts, which log in with their nkeys, and from
// those who want to join, which know only the authority's fingerprint.
func (k *Keys) forHosts(certificate, authority []byte) (*tls.Config, error) {
	own, err := decodeCertificate(certificate)
	if err != nil {
		return nil, err
	}
	root, err := decodeCertificate(authority)
	if err != nil {
		return nil, err
	}
	return &tls.Config{
		MinVersion:   tls.VersionTLS13,
		Certificates: []tls.Certificate{{Certificate: [][]byte{own.Raw, root.Raw}, PrivateKey: k.tls}},
	}, nil
}
